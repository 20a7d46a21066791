"""Cache mode `align`: states at block ends may be reused; a request keeps its running block.

Column `b` holds the state after up to `(b + 1) * block_size` tokens, so the state found in a full
block is the one at its end. Decode and prefill see only the columns of the running block.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy.typing as npt

from ssmcore.blocks import BlockOptions, FixedBlocks, column_after, counting
from ssmcore.hookspecs import hookimpl
from ssmcore.step import Rows
from ssmcore.strategies import (
    CacheModeRecord,
    Conflict,
    DraftColumns,
    Field,
    IntArray,
    Selection,
)


class AlignCache(FixedBlocks):
    """State in the column of the running block."""

    fields: tuple[Field, ...] = ()
    whole_rows = False

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
        options=BlockOptions,
        create=AlignCache,
    )
