"""Cache mode `none`: one slot for a request's whole life, no reuse.

With speculative tokens a request has `1 + S` slots, one for each token that may be accepted.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from ssmcore.blocks import counting
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


class NoCache:
    """State in column 0; drafts in columns `1..S`."""

    fields: tuple[Field, ...] = ()
    block_size: int | None = None
    whole_rows = False
    reuses_states = False

    def __init__(self, options: StrategyOptions, context: CreateContext) -> None:
        self._num_spec_tokens = context.limits.num_spec_tokens

    def check(self, selection: Selection) -> Conflict | None:
        """Lives with every strategy."""
        return None

    def table_width(self, max_tokens: int) -> int:
        """Columns `0..S`, whatever the length."""
        return 1 + self._num_spec_tokens

    def column(self, tokens: IntArray) -> IntArray:
        """Always column 0."""
        return np.zeros_like(tokens)

    def last_boundary(self, tokens: IntArray) -> IntArray | None:
        """A row has no boundaries."""
        return None

    def state_writes(self, rows: Rows) -> tuple[IntArray, IntArray]:
        """Each row's last state."""
        return counting(rows.num_rows), rows.seq_lens

    def draft_columns(self, rows: Rows) -> DraftColumns:
        """Columns `0..S`, before the step and after it."""
        zeros = np.zeros_like(rows.seq_lens)
        return DraftColumns(zeros, zeros, zeros, zeros + self._num_spec_tokens)

    def columns_written(self, computed: int, seq_len: int) -> range:
        """Column 0."""
        return range(1)

    def boundaries(self, max_tokens: int) -> Sequence[int]:
        """No state is reusable."""
        return ()

    def published(self, computed: int, seq_len: int) -> Sequence[int]:
        """No state is reusable."""
        return ()

    def prefill_end(self, computed: int, limit: int, target: int) -> int:
        """As far as the budget goes."""
        return limit

    def plan_fields(self, rows: Rows, out: Mapping[str, npt.NDArray[Any]]) -> None:
        """Declares no fields."""

    def describe(
        self, rows: Rows, num_decodes: int, fields: Mapping[str, npt.NDArray[Any]]
    ) -> dict[str, Any] | None:
        """Nothing to print."""
        return None


@hookimpl
def ssmcore_cache_modes() -> Iterator[CacheModeRecord]:
    """Offer `none`."""
    yield CacheModeRecord(
        name="none",
        summary="One slot per request, no prefix reuse.",
        options=StrategyOptions,
        create=NoCache,
    )
