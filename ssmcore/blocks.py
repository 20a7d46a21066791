"""Block arithmetic shared by cache modes: which column of a block table holds which state.

All functions are vectorised over int64 token counts; `block_size` is in tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import numpy as np
import numpy.typing as npt
from pydantic import Field as Option

from ssmcore.strategies import CreateContext, IntArray, StrategyOptions


@lru_cache(maxsize=1024)
def constant(value: int) -> IntArray:
    """A number as an array: as a Python integer it is converted again by every operation.

    On a few hundred rows that costs as much as the operation itself.
    """
    array = np.array(value, dtype=np.int64)
    array.flags.writeable = False
    return array


def counting(stop: int) -> IntArray:
    """0, 1, 2... below `stop`, int64, read-only."""
    return _counts[:stop] if stop <= _MOST_COUNTS else np.arange(stop)


def counting32(stop: int) -> npt.NDArray[np.int32]:
    """0, 1, 2... below `stop`, int32, read-only."""
    return _counts32[:stop] if stop <= _MOST_COUNTS else np.arange(stop, dtype=np.int32)


_MOST_COUNTS = 2**16
"""Longer sequences are made when they are wanted."""

_counts: IntArray = np.arange(_MOST_COUNTS)
_counts32 = np.arange(_MOST_COUNTS, dtype=np.int32)
_counts.flags.writeable = _counts32.flags.writeable = False


def quotient(values: IntArray, divisor: int) -> IntArray:
    """`values // divisor`; powers of two, the common case, shift instead."""
    if divisor & (divisor - 1):
        return values // constant(divisor)
    return values >> constant(divisor.bit_length() - 1)


def remainder(values: IntArray, divisor: int) -> IntArray:
    """`values % divisor`, never negative; powers of two, the common case, mask instead."""
    if divisor & (divisor - 1):
        return values % constant(divisor)
    return values & constant(divisor - 1)


def column_after(tokens: IntArray, block_size: int) -> IntArray:
    """Column of the state after `tokens` tokens: `max(0, (tokens - 1) // block_size)`."""
    columns = quotient(tokens - constant(1), block_size)
    return np.maximum(columns, constant(0), out=columns)


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
    row = counting(len(counts)).repeat(counts)
    nth = counting(len(row)) - (ends - counts - 1).repeat(counts)
    return row, np.minimum((first[row] + nth) * block_size, seq_lens[row])


class BlockOptions(StrategyOptions):
    """Options of cache modes with blocks of one size."""

    block_size: int = Option(default=256, ge=1, le=2**31 - 1, strict=True)
    """Tokens of a cache block; states are reusable at its multiples."""


class FixedBlocks:
    """Where states stand when column `b` holds the state after up to `(b + 1) * block_size` tokens.

    The part of a `CacheMode` that follows from the block size alone; subclasses add the rest.
    """

    reuses_states = True

    def __init__(self, options: BlockOptions, context: CreateContext) -> None:
        self.block_size: int | None = options.block_size
        self._size = options.block_size
        self._num_spec_tokens = context.limits.num_spec_tokens

    def table_width(self, max_tokens: int) -> int:
        """One column a block, and `S` behind the last."""
        return max(1, -(-max_tokens // self._size)) + self._num_spec_tokens

    def column(self, tokens: IntArray) -> IntArray:
        """`max(0, (tokens - 1) // block_size)`."""
        return column_after(tokens, self._size)

    def last_boundary(self, tokens: IntArray) -> IntArray | None:
        """The block start at or before `tokens`."""
        return block_start(tokens, self._size)

    def boundaries(self, max_tokens: int) -> Sequence[int]:
        """Every block end."""
        return range(self._size, max_tokens + 1, self._size)
