"""Cache mode `align`: states at block ends may be reused; a request keeps its running block.

Column `b` holds the state after up to `(b + 1) * block_size` tokens, so the state found in a full
block is the one at its end. Decode and prefill see only the columns of the running block.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy.typing as npt
from pydantic import Field as Option

from ssmcore.blocks import block_start, column_after, counting
from ssmcore.hookspecs import hookimpl
from ssmcore.step import Rows
from ssmcore.strategies import (
    CacheModeRecord,
    Conflict,
    CreateContext,
    DraftColumns,
    Field,
    IntArray,
    Selection,
    StrategyOptions,
)


class AlignOptions(StrategyOptions):
    """Options of `align`."""

    block_size: int = Option(default=256, ge=1, le=2**31 - 1, strict=True)
    """Tokens of a cache block; states are reusable at its multiples."""


class AlignCache:
    """State in the column of the running block."""

    fields: tuple[Field, ...] = ()
    whole_rows = False
    reuses_states = True

    def __init__(self, options: AlignOptions, context: CreateContext) -> None:
        self.block_size: int | None = options.block_size
        self._size = options.block_size
        self._num_spec_tokens = context.limits.num_spec_tokens

    def check(self, selection: Selection) -> Conflict | None:
        """Refuses to run blocks that no prefill step can fill."""
        budget = selection.limits.max_num_batched_tokens
        if selection.running and self._size > budget:
            return Conflict(
                setting=f"cache.block_size = {self._size}",
                other=f"engine.max_num_batched_tokens = {budget}",
                reason="a prefill step must be able to end at a block boundary",
                instead=f"cache.block_size of at most {budget}, or a larger token budget",
            )
        return None

    def table_width(self, max_tokens: int) -> int:
        """One column a block, and `S` behind the last."""
        return max(1, -(-max_tokens // self._size)) + self._num_spec_tokens

    def column(self, tokens: IntArray) -> IntArray:
        """`max(0, (tokens - 1) // block_size)`."""
        return column_after(tokens, self._size)

    def last_boundary(self, tokens: IntArray) -> IntArray | None:
        """The block start at or before `tokens`."""
        return block_start(tokens, self._size)

    def state_writes(self, rows: Rows) -> tuple[IntArray, IntArray]:
        """Each row's last state."""
        return counting(rows.num_rows), rows.seq_lens

    def draft_columns(self, rows: Rows) -> DraftColumns:
        """Columns `b..b + S` of the running block `b`, before the step and after it."""
        block = column_after(rows.seq_lens, self._size)
        return DraftColumns(block, block, block, block + self._num_spec_tokens)

    def columns_written(self, computed: int, seq_len: int) -> range:
        """The running block; blocks that the step passes over need no slot."""
        block = max(0, (seq_len - 1) // self._size)
        return range(block, block + 1)

    def boundaries(self, max_tokens: int) -> Sequence[int]:
        """Every block end."""
        return range(self._size, max_tokens + 1, self._size)

    def published(self, computed: int, seq_len: int) -> Sequence[int]:
        """The end of the step, if it is a block's."""
        return () if seq_len % self._size else (seq_len,)

    def prefill_end(self, computed: int, limit: int, target: int) -> int:
        """The last block end within the budget that leaves a token to run.

        So the state there is published, and the same prompt finds it when it comes again. From that
        block end on, and within a block that the budget cannot fill, as far as the budget goes.
        """
        boundary = min(limit, target - 1) // self._size * self._size
        return boundary if boundary > computed else limit

    def plan_fields(self, rows: Rows, out: Mapping[str, npt.NDArray[Any]]) -> None:
        """Declares no fields."""

    def describe(
        self, rows: Rows, num_decodes: int, fields: Mapping[str, npt.NDArray[Any]]
    ) -> dict[str, Any] | None:
        """Nothing to print."""
        return None


@hookimpl
def ssmcore_cache_modes() -> Iterator[CacheModeRecord]:
    """Offer `align`."""
    yield CacheModeRecord(
        name="align",
        summary="Prefix reuse at block boundaries; keeps running and boundary blocks.",
        options=AlignOptions,
        create=AlignCache,
    )
