"""Prefill metadata: chunks of the SSD scan, programs of the convolution, and the states to write.

Everything is vectorised over rows; no loop runs over rows, tokens or chunks. Sizes first, so that
the caller can lay out memory, then the arrays into it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from ssmcore.blocks import constant, counting, counting32, quotient, remainder
from ssmcore.step import Rows
from ssmcore.strategies import IntArray

CONV_TOKENS = 8
"""Tokens of one program of the prefill convolution."""


class PrefillSizes:
    """Counts per prefill row and in all.

    Attributes:
        offset: (P,), position of each row's first token within its chunk.
        chunks, programs: (P,), chunks and convolution programs of each row.
        first_chunk, first_program: (P,), those of earlier rows.
        num_chunks, num_programs: totals.
    """

    __slots__ = (
        "chunk_size",
        "chunks",
        "first_chunk",
        "first_program",
        "num_chunks",
        "num_programs",
        "offset",
        "programs",
    )

    def __init__(self, rows: Rows, chunk_size: int) -> None:
        self.chunk_size = chunk_size
        self.offset: IntArray = remainder(rows.computed, chunk_size)
        self.chunks = _pieces(self.offset + rows.query_lens, chunk_size)
        self.programs = _pieces(rows.query_lens, CONV_TOKENS)
        chunk_ends, program_ends = self.chunks.cumsum(), self.programs.cumsum()
        self.first_chunk: IntArray = chunk_ends - self.chunks
        self.first_program: IntArray = program_ends - self.programs
        self.num_chunks = int(chunk_ends.item(-1))
        self.num_programs = int(program_ends.item(-1))


def _pieces(tokens: IntArray, size: int) -> IntArray:
    return quotient(tokens + constant(size - 1), size)


def fill_chunks(rows: Rows, sizes: PrefillSizes, out: Mapping[str, npt.NDArray[Any]]) -> None:
    """Fill `cu_seqlens`, `seq_idx`, `last_indices`, `batch_ptr` and `token_chunk_offset`.

    A chunk ends at every multiple of the chunk size of the row's absolute position, and at the
    row's end; so all are full but each row's first and last.
    """
    size, first = sizes.chunk_size, sizes.first_chunk
    starts = rows.query_start_loc[:-1]
    index = counting32(rows.num_rows)  # repeating 32 bits is twice as fast as 64
    out["seq_idx"][:] = index.repeat(sizes.chunks)
    out["last_indices"][:] = first + sizes.chunks - constant(1)

    # each chunk at its multiple of the chunk size, but each row's first where the row starts
    begins = (starts - sizes.offset - first * constant(size)).repeat(sizes.chunks)
    begins += counting(sizes.num_chunks) * constant(size)
    begins[first] = starts
    out["cu_seqlens"][:-1] = begins
    out["cu_seqlens"][-1] = rows.query_start_loc[-1]

    out["batch_ptr"][:] = index.repeat(sizes.programs)
    np.subtract(
        counting32(sizes.num_programs),
        sizes.first_program.astype(np.int32).repeat(sizes.programs),
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
    out["write_ends"][:] = rows.query_start_loc[row] + done
    chunks = _pieces(sizes.offset[row] + done, sizes.chunk_size)
    out["write_chunks"][:] = sizes.first_chunk[row] + chunks - constant(1)
