"""Batch classifier `decode-first`: decodes lead the step, prefills follow.

A row decodes when it schedules few enough tokens for the decode path and misses no prompt tokens; a
one-token prompt tail (padded with drafts or not) is promoted to a decode, since that path can roll
drafts back. The decodes of a step are its leading run of such rows.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from ssmcore.blocks import constant
from ssmcore.hookspecs import hookimpl
from ssmcore.step import Rows
from ssmcore.strategies import (
    BatchClassifierRecord,
    Conflict,
    CreateContext,
    Field,
    Selection,
    StrategyOptions,
)


class DecodeFirst:
    """Leading run of decode-like rows; see `docs/steps.md` for the rule."""

    fields: tuple[Field, ...] = ()

    def __init__(self, options: StrategyOptions, context: CreateContext) -> None:
        self._num_spec_tokens = context.limits.num_spec_tokens

    def check(self, selection: Selection) -> Conflict | None:
        """Lives with every strategy."""
        return None

    def num_decodes(self, rows: Rows) -> int:
        """Length of the leading run of decode-like rows."""
        most = 1 if rows.num_accepted_tokens is None else 1 + self._num_spec_tokens
        lens = rows.query_lens
        if lens.item(lens.argmax()) <= most and not np.count_nonzero(rows.is_prefilling):
            return rows.num_rows
        promoted = lens == constant(1)
        if rows.num_draft_tokens is not None:
            drafts = rows.num_draft_tokens
            promoted |= (drafts >= 0) & (lens == drafts + 1)
        promoted &= rows.computed > constant(0)
        prefill_like = (lens > constant(most)) | (rows.is_prefilling & ~promoted)
        if rows.num_real < rows.num_rows:
            prefill_like[rows.num_real :] = False
        first = int(prefill_like.argmax())
        return first if prefill_like[first] else rows.num_rows


@hookimpl
def ssmcore_batch_classifiers() -> Iterator[BatchClassifierRecord]:
    """Offer `decode-first`."""
    yield BatchClassifierRecord(
        name="decode-first",
        summary="Decodes lead the step, prefills follow; one-token prompt tails run as decodes.",
        options=StrategyOptions,
        create=DecodeFirst,
    )
