"""Cache mode `all`: every block keeps the state at its end, whatever the chunking of the prompt."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from ssmcore.blocks import BlockOptions, FixedBlocks, column_after, crossed_boundaries
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


class AllCache(FixedBlocks):
    """State of every block in its column; kernels get whole block table rows."""

    fields: tuple[Field, ...] = (
        Field("last_scheduled_block"),
        Field("last_computed_block"),
        Field("first_scheduled_block"),
        Field("last_scheduled_block_prev_step"),
    )
    whole_rows = True

    def check(self, selection: Selection) -> Conflict | None:
        """Refuses to run blocks that do not end with a chunk, and drafts."""
        drafts = selection.limits.num_spec_tokens
        if selection.running and drafts:
            return Conflict(
                setting="cache.name = 'all'",
                other=f"engine.num_spec_tokens = {drafts}",
                reason="a state at every block end and one for every draft cannot both be kept yet",
                instead="cache.name = 'align' or 'none', or engine.num_spec_tokens = 0",
            )
        chunk = selection.limits.chunk_size
        if selection.running and self._size % chunk:
            return Conflict(
                setting=f"cache.block_size = {self._size}",
                other=f"the model's chunk size = {chunk}",
                reason="states are to be had at chunk ends only, and every block end keeps one",
                instead=f"a cache.block_size that is a multiple of {chunk}",
            )
        return None

    def state_writes(self, rows: Rows) -> tuple[IntArray, IntArray]:
        """The state at every block end that the step crosses, and each row's last."""
        return crossed_boundaries(rows.computed, rows.seq_lens, self._size)

    def draft_columns(self, rows: Rows) -> DraftColumns:
        """Reads from the previous step's last block on, writes from this step's last block on."""
        last = column_after(rows.seq_lens, self._size)
        return DraftColumns(
            read_first=self._previous_block(rows),
            write_first=last,
            needed_first=rows.computed // self._size,
            needed_last=last,
        )

    def _previous_block(self, rows: Rows) -> IntArray:
        computed = column_after(rows.computed, self._size)
        previous = rows.prev_last_scheduled_block
        return computed if previous is None else np.where(previous >= 0, previous, computed)

    def columns_written(self, computed: int, seq_len: int) -> range:
        """Every block that the step touches."""
        return range(computed // self._size, max(0, (seq_len - 1) // self._size) + 1)

    def published(self, computed: int, seq_len: int) -> Sequence[int]:
        """Every block end that the step reaches."""
        return range((computed // self._size + 1) * self._size, seq_len + 1, self._size)

    def prefill_end(self, computed: int, limit: int, target: int) -> int:
        """As far as the budget goes; block ends on the way are written too."""
        return limit

    def plan_fields(self, rows: Rows, out: Mapping[str, npt.NDArray[Any]]) -> None:
        """Block of the last scheduled, last computed and first scheduled token of every row."""
        out["last_scheduled_block"][:] = column_after(rows.seq_lens, self._size)
        out["last_computed_block"][:] = column_after(rows.computed, self._size)
        out["first_scheduled_block"][:] = rows.computed // self._size
        out["last_scheduled_block_prev_step"][:] = self._previous_block(rows)

    def describe(
        self, rows: Rows, num_decodes: int, fields: Mapping[str, npt.NDArray[Any]]
    ) -> dict[str, Any] | None:
        """Blocks of every row; the previous step's only where it was given."""
        previous = self._num_spec_tokens and rows.prev_last_scheduled_block is not None
        prefills = num_decodes < rows.num_rows
        return {
            "last_scheduled_block": fields["last_scheduled_block"].tolist(),
            "last_computed_block": fields["last_computed_block"].tolist(),
            "first_scheduled_block_prefill": (
                fields["first_scheduled_block"][num_decodes:].tolist() if prefills else None
            ),
            "last_scheduled_block_prev_step": (
                fields["last_scheduled_block_prev_step"].tolist() if previous else None
            ),
        }


@hookimpl
def ssmcore_cache_modes() -> Iterator[CacheModeRecord]:
    """Offer `all`."""
    yield CacheModeRecord(
        name="all",
        summary="Keeps the state at every block end for prefix reuse.",
        options=BlockOptions,
        create=AllCache,
    )
