"""Which arrays a plan's memory holds: the core's fields and those that strategies declare."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from ssmcore.chunks import PrefillSizes
from ssmcore.plan import PARTS
from ssmcore.step import Rows
from ssmcore.strategies import Field, Limits, Selection

_INT32, _BOOL = np.dtype(np.int32), np.dtype(np.bool_)

LayoutFields = Iterator[tuple[tuple[str, str], np.dtype[Any], tuple[int, ...]]]
"""Part and name, dtype, shape."""


def declared_fields(selection: Selection) -> list[tuple[str, Field]]:
    """Part and field of everything the four strategies declare."""
    return [
        (part, field)
        for part in PARTS
        if part != "prefill"
        for field in getattr(getattr(selection, part), "fields", ())
    ]


def row_fields(
    rows: Rows, num_decodes: int, selection: Selection, declared: list[tuple[str, Field]]
) -> LayoutFields:
    """Fields whose sizes depend on row counts and the block table's width alone."""
    drafts = selection.limits.num_spec_tokens
    whole_rows, width = selection.cache.whole_rows, rows.block_table.shape[1]
    if num_decodes:
        count = (num_decodes,)
        accepted = rows.num_accepted_tokens is not None
        columns = width if whole_rows else 1 + drafts
        yield ("decode", "state_indices"), _INT32, (num_decodes, columns)
        yield ("decode", "conv_read_slots"), _INT32, count
        yield ("decode", "state_read_slots"), _INT32, count
        written = (num_decodes, 1 + drafts) if accepted and drafts else count
        yield ("decode", "write_slots"), _INT32, written
        if accepted:
            yield ("decode", "query_start_loc"), _INT32, (num_decodes + 1,)
            yield ("decode", "num_accepted_tokens"), _INT32, count
    for part, field in declared:
        extent = num_decodes if part == "decode" else rows.num_rows
        if extent:
            yield (part, field.name), np.dtype(field.dtype), (extent, *field.shape)
    num_prefills = rows.num_rows - num_decodes
    if num_prefills:
        count = (num_prefills,)
        yield ("prefill", "query_start_loc"), _INT32, (num_prefills + 1,)
        yield ("prefill", "has_initial_states"), _BOOL, count
        yield ("prefill", "state_indices"), _INT32, (num_prefills, width) if whole_rows else count
        if whole_rows:
            yield ("prefill", "num_computed_tokens"), _INT32, count
        for name in ("conv_read_slots", "state_read_slots", "write_slots", "last_indices"):
            yield ("prefill", name), _INT32, count


def chunk_fields(sizes: PrefillSizes, num_writes: int) -> LayoutFields:
    """Fields of the prefill part whose sizes differ from step to step."""
    yield ("prefill", "cu_seqlens"), _INT32, (sizes.num_chunks + 1,)
    yield ("prefill", "seq_idx"), _INT32, (sizes.num_chunks,)
    yield ("prefill", "batch_ptr"), _INT32, (sizes.num_programs,)
    yield ("prefill", "token_chunk_offset"), _INT32, (sizes.num_programs,)
    for name in ("write_rows", "write_ends", "write_chunks", "state_write_slots"):
        yield ("prefill", name), _INT32, (num_writes,)


def largest_plan_bytes(
    limits: Limits, selection: Selection, declared: list[tuple[str, Field]]
) -> int:
    """Bytes that hold the plan of any step within the engine's limits."""
    cache = selection.cache
    rows, tokens = limits.max_num_seqs, limits.max_num_batched_tokens
    width = cache.table_width(limits.max_model_len)
    columns = width if cache.whole_rows else 1 + limits.num_spec_tokens
    per_row = 4 * (columns + limits.num_spec_tokens + 16) + sum(
        np.dtype(field.dtype).itemsize * int(np.prod(field.shape, initial=1))
        for _, field in declared
    )
    chunks = tokens // limits.chunk_size + 2 * rows
    writes = tokens // (cache.block_size or tokens) + 2 * rows
    programs = tokens // 8 + rows
    return rows * per_row + 4 * (2 * chunks + 4 * writes + 2 * programs) + 4096
