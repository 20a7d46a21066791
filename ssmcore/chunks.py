"""Prefill metadata: chunks of the SSD scan, programs of the convolution, and the states to write.

Everything is vectorised over rows; no loop runs over rows, tokens or chunks. Sizes first, so that
the caller can lay out memory, then the arrays into it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from ssmcore.step import Rows
from ssmcore.strategies import IntArray

CONV_TOKENS = 8
"""Tokens of one program of the prefill convolution."""


class PrefillSizes:
    """Counts per prefill row and in all.

    Attributes:
        offset: (P,), position of each row's first token within its chunk.
        chunks, programs: (P,), chunks and convolution programs of each row.
        num_chunks, num_programs: totals.
    """

    __slots__ = ("chunk_size", "chunks", "num_chunks", "num_programs", "offset", "programs")

    def __init__(self, rows: Rows, chunk_size: int) -> None:
        self.chunk_size = chunk_size
        self.offset: IntArray = rows.computed % chunk_size
        self.chunks: IntArray = (self.offset + rows.query_lens + (chunk_size - 1)) // chunk_size
        self.programs: IntArray = (rows.query_lens + (CONV_TOKENS - 1)) // CONV_TOKENS
        self.num_chunks = int(self.chunks.sum())
        self.num_programs = int(self.programs.sum())


def fill_chunks(rows: Rows, sizes: PrefillSizes, out: Mapping[str, npt.NDArray[Any]]) -> None:
    """Fill `cu_seqlens`, `seq_idx`, `last_indices`, `batch_ptr` and `token_chunk_offset`.

    A chunk ends at every multiple of the chunk size of the row's absolute position, and at the
    row's end; so all are full but each row's first and last.
    """
    size = sizes.chunk_size
    index = np.arange(rows.num_rows, dtype=np.int32)
    last = np.cumsum(sizes.chunks) - 1
    first = last - sizes.chunks + 1

    cu_seqlens = out["cu_seqlens"]
    cu_seqlens[0] = 0
    lengths = cu_seqlens[1:]
    lengths.fill(size)
    lengths[first] -= sizes.offset
    lengths[last] += rows.query_lens + sizes.offset - sizes.chunks * size
    np.cumsum(lengths, out=lengths)
    out["seq_idx"][:] = np.repeat(index, sizes.chunks)
    out["last_indices"][:] = last

    batch_ptr = out["batch_ptr"]
    batch_ptr[:] = np.repeat(index, sizes.programs)
    starts = (np.cumsum(sizes.programs) - sizes.programs).astype(np.int32)
    np.subtract(
        np.arange(sizes.num_programs, dtype=np.int32),
        np.repeat(starts, sizes.programs),
        out=out["token_chunk_offset"],
    )


def fill_writes(
    rows: Rows,
    sizes: PrefillSizes,
    row: IntArray,
    tokens: IntArray,
    out: Mapping[str, npt.NDArray[Any]],
) -> None:
    """Fill `write_rows`, `write_ends` and `write_chunks` for states after `tokens` of rows `row`.

    `write_ends` are packed token offsets (exclusive), `write_chunks` the chunks that end there.
    """
    done = tokens - rows.computed[row]
    out["write_rows"][:] = row
    np.add(rows.query_start_loc[row], done, out=out["write_ends"], casting="same_kind")
    first = np.cumsum(sizes.chunks) - sizes.chunks
    size = sizes.chunk_size
    out["write_chunks"][:] = first[row] + (sizes.offset[row] + done + (size - 1)) // size - 1
