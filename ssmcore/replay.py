"""The cursor rules of the ReplaySSM family, shared by every algorithm that keeps a ring of inputs.

A row's whole state stands at its anchor (or at the last block boundary after it); from there a ring of
`L` inputs fills, and the `L`-th step flushes. Cursors are a function of token counts alone, so nothing
is read back from a device.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from ssmcore.strategies import BoolArray, CacheMode, IntArray
from ssmcore.step import Rows


class Cursors(NamedTuple):
    """Per decode row: pending ring entries before the step, and whether the step flushes."""

    write_pos: IntArray
    is_flush: BoolArray


def steps_since_anchor(rows: Rows, cache: CacheMode) -> IntArray:
    """Tokens decoded since the anchor or the last boundary after it; negative for a leftover row.

    A leftover is a one-token prompt tail that runs as a decode, before the anchor is reached.
    """
    base = rows.decode_base
    if base is None:  # refused when the step is validated
        raise ValueError("decode_base is needed")
    boundary = cache.last_boundary(rows.computed)
    return rows.computed - (base if boundary is None else np.maximum(base, boundary))


def ring_cursors(rows: Rows, cache: CacheMode, buffer_len: int) -> Cursors:
    """Cursors of a ring of `buffer_len` entries (semantics of `replay-torch` and `replay-triton`).

    `write_pos = steps mod L`, flush when `write_pos == L - 1`, when the step completes a block, or
    when the row is a leftover (then `write_pos = 0`). Padding rows: 0, no flush.
    """
    steps = steps_since_anchor(rows, cache)
    write_pos = steps % buffer_len
    is_flush = write_pos == buffer_len - 1
    leftover = steps < 0
    if leftover.any():
        write_pos[leftover] = 0
        is_flush |= leftover
    boundary = cache.last_boundary(rows.seq_lens)
    if boundary is not None:
        is_flush |= boundary == rows.seq_lens
    if rows.num_real < len(rows):
        write_pos[rows.num_real :] = 0
        is_flush[rows.num_real :] = False
    return Cursors(write_pos, is_flush)
