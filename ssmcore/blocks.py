"""Block arithmetic shared by cache modes: which column of a block table holds which state.

All functions are vectorised over int64 token counts; `block_size` is in tokens.
"""

from __future__ import annotations

import numpy as np

from ssmcore.strategies import IntArray


def quotient(values: IntArray, divisor: int) -> IntArray:
    """`values // divisor`; powers of two, the common case, shift instead."""
    shift = divisor.bit_length() - 1
    return values >> shift if divisor == 1 << shift else values // divisor


def remainder(values: IntArray, divisor: int) -> IntArray:
    """`values % divisor`, never negative; powers of two, the common case, mask instead."""
    mask = divisor - 1
    return values & mask if divisor & mask == 0 else values % divisor


def column_after(tokens: IntArray, block_size: int) -> IntArray:
    """Column of the state after `tokens` tokens: `max(0, (tokens - 1) // block_size)`."""
    columns = quotient(tokens - 1, block_size)
    return np.maximum(columns, 0, out=columns)


def block_start(tokens: IntArray, block_size: int) -> IntArray:
    """Greatest block boundary at most `tokens`."""
    return tokens - remainder(tokens, block_size)


def crossed_boundaries(
    computed: IntArray, seq_lens: IntArray, block_size: int
) -> tuple[IntArray, IntArray]:
    """Every state that rows leave between `computed` and `seq_lens`, at block ends and at the end.

    Returns `(row, tokens)`, both of one entry per state, rows in order, each row's last state last.
    """
    first = quotient(computed, block_size)
    counts = quotient(seq_lens + (block_size - 1), block_size) - first
    ends = counts.cumsum()
    row = np.arange(len(counts)).repeat(counts)
    nth = np.arange(1, len(row) + 1) - (ends - counts).repeat(counts)
    return row, np.minimum((first[row] + nth) * block_size, seq_lens[row])
