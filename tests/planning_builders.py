"""Builders of pipelines and steps for tests of planning; plain functions, no fixtures."""

from __future__ import annotations

import numpy as np
from ssmcore_plugins.baseline import Baseline
from ssmcore_plugins.cache_align import AlignCache
from ssmcore_plugins.cache_all import AllCache
from ssmcore_plugins.cache_none import NoCache
from ssmcore_plugins.decode_first import DecodeFirst
from ssmcore_plugins.full_decode import FullDecode, FullDecodeOptions
from ssmcore_plugins.graph_none import NoGraphs
from ssmcore_plugins.replay_torch import ReplayTorch

from ssmcore.blocks import BlockOptions
from ssmcore.pipeline import Pipeline
from ssmcore.replay import ReplayOptions
from ssmcore.step import Step
from ssmcore.strategies import CreateContext, Limits, Selection, StrategyOptions


def make_pipeline(
    *,
    cache: str = "none",
    block_size: int = 4,
    decode: str = "baseline",
    buffer_len: int = 4,
    graph: str = "none",
    max_num_seqs: int = 16,
    max_model_len: int = 256,
    max_num_batched_tokens: int = 4096,
    num_spec_tokens: int = 0,
    chunk_size: int = 4,
    device: str | None = None,
    num_slots: int | None = None,
) -> Pipeline:
    limits = Limits(
        max_num_seqs, max_model_len, max_num_batched_tokens, num_spec_tokens, chunk_size
    )
    context = CreateContext(limits)
    caches = {
        "none": lambda: NoCache(StrategyOptions(), context),
        "align": lambda: AlignCache(BlockOptions(block_size=block_size), context),
        "all": lambda: AllCache(BlockOptions(block_size=block_size), context),
    }
    decodes = {
        "baseline": lambda: Baseline(StrategyOptions(), context),
        "replay-torch": lambda: ReplayTorch(ReplayOptions(buffer_len=buffer_len), context),
    }
    graphs = {
        "none": lambda: NoGraphs(StrategyOptions(), context),
        "full-decode": lambda: FullDecode(FullDecodeOptions(), context),
    }
    selection = Selection(
        DecodeFirst(StrategyOptions(), context),
        caches[cache](),
        decodes[decode](),
        graphs[graph](),
        {"classifier": "decode-first", "cache": cache, "decode": decode, "graph": graph},
        limits,
    )
    return Pipeline(selection, device=device, num_slots=num_slots)


def make_step(
    rows: list[tuple[int, int]],
    *,
    width: int = 1,
    prefilling: list[bool] | None = None,
    table: list[list[int]] | None = None,
    **optional: list[int],
) -> Step:
    """A step of `(query_len, seq_len)` rows, each with slots of its own over the whole table."""
    lens = [query for query, _ in rows]
    if table is None:
        table = [
            [1 + row * width + column if query else 0 for column in range(width)]
            for row, (query, _) in enumerate(rows)
        ]
    return Step.of(
        np.concatenate([[0], np.cumsum(lens)]),
        [seq_len for _, seq_len in rows],
        prefilling if prefilling is not None else [query > 1 for query in lens],
        table,
        **optional,
    )
