"""Block arithmetic shared by cache modes: which column of a block table holds which state.

All functions are vectorised over int64 token counts; `block_size` is in tokens.
"""

from __future__ import annotations

import numpy as np

from ssmcore.strategies import IntArray


def column_after(tokens: IntArray, block_size: int) -> IntArray:
    """Column of the state after `tokens` tokens: `max(0, (tokens - 1) // block_size)`."""
    columns = (tokens - 1) // block_size
    return np.maximum(columns, 0, out=columns)


def block_start(tokens: IntArray, block_size: int) -> IntArray:
    """Greatest block boundary at most `tokens`."""
    return tokens // block_size * block_size


def crossed_boundaries(
    computed: IntArray, seq_lens: IntArray, block_size: int
) -> tuple[IntArray, IntArray]:
    """Every state that rows leave between `computed` and `seq_lens`, at block ends and at the end.

    Returns `(row, tokens)`, both of one entry per state, rows in order, each row's last state last.
    """
    first = computed // block_size
    counts = -(-seq_lens // block_size) - first
    ends = np.cumsum(counts)
    row = np.repeat(np.arange(len(counts)), counts)
    nth = np.arange(1, len(row) + 1) - np.repeat(ends - counts, counts)
    return row, np.minimum((first[row] + nth) * block_size, seq_lens[row])
