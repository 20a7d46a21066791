"""The rules a step must keep, each refused with the row at fault before anything is written.

The common case passes on a few reductions; only a failing step pays for finding the row.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from ssmcore.errors import StepError
from ssmcore.step import Rows
from ssmcore.strategies import BoolArray, IntArray, Limits

MAX_SLOTS = 2**31
"""Slots are int32 on the device."""

MAX_STEP_TOKENS = 2**31 - 1

_DENSE_SLOTS = 2**22


def check_rows(rows: Rows, limits: Limits) -> None:
    """Refuse a step whose counts cannot be; sets `rows.num_real` and `rows.all_have_prior`.

    Raises:
        StepError: `empty`, `query_start_loc`, `max_num_seqs`, `padding`, `seq_len`,
            `max_model_len`, `num_accepted_tokens`, `num_draft_tokens`, `decode_base` or
            `too_many_tokens`.
    """
    num_rows = rows.num_rows
    if num_rows == 0:
        raise StepError("empty", "the step has no rows")
    margins = np.empty((5, num_rows), dtype=np.int64)
    margins[0] = rows.query_lens
    margins[1] = rows.computed
    np.subtract(limits.max_model_len, rows.seq_lens, out=margins[2])
    margins[3] = 0 if rows.decode_base is None else rows.decode_base
    margins[4] = rows.seq_lens  # differences with far negative lengths would wrap around
    shortest, least_computed, room, base, least_length = np.minimum.reduce(margins, axis=1).tolist()
    total = int(rows.query_start_loc[-1])
    if (
        rows.query_start_loc[0] != 0
        or shortest < 0
        or not 0 < total <= MAX_STEP_TOKENS
        or num_rows > limits.max_num_seqs
        or least_computed < 0
        or least_length < 0
        or room < 0
        or base < 0
    ):
        _refuse_counts(rows, limits)
    rows.all_have_prior = least_computed > 0
    if shortest == 0:
        rows.num_real = _num_real(rows.query_lens)
        rows.all_have_prior = bool(rows.computed[: rows.num_real].min() > 0)
    if rows.num_accepted_tokens is not None or rows.num_draft_tokens is not None:
        _check_drafts(rows, limits)


def _refuse_counts(rows: Rows, limits: Limits) -> None:
    """Name the first broken rule of `check_rows` and its row."""
    loc, query_lens = rows.query_start_loc, rows.query_lens
    if loc[0] != 0:
        raise StepError("query_start_loc", f"query_start_loc must start at 0, not {loc[0]}", 0)
    if (query_lens < 0).any():
        row = _first(query_lens < 0)
        raise StepError(
            "query_start_loc",
            f"query_start_loc decreases at row {row}: {loc[row]} then {loc[row + 1]}",
            row,
        )
    if loc[-1] == 0:
        raise StepError("empty", "the step schedules no token")
    if loc[-1] > MAX_STEP_TOKENS:
        raise StepError("too_many_tokens", f"a step of {loc[-1]} tokens is beyond 32-bit offsets")
    if rows.num_rows > limits.max_num_seqs:
        raise StepError(
            "max_num_seqs",
            f"the step has {rows.num_rows} rows, engine.max_num_seqs is {limits.max_num_seqs}",
            limits.max_num_seqs,
        )
    too_short = (rows.seq_lens < query_lens) | (rows.seq_lens < 0)
    if too_short.any():
        row = _first(too_short)
        raise StepError(
            "seq_len",
            f"row {row} schedules {query_lens[row]} tokens, more than its sequence length"
            f" {rows.seq_lens[row]}",
            row,
        )
    if (rows.seq_lens > limits.max_model_len).any():
        row = _first(rows.seq_lens > limits.max_model_len)
        raise StepError(
            "max_model_len",
            f"row {row} has {rows.seq_lens[row]} tokens, engine.max_model_len is"
            f" {limits.max_model_len}",
            row,
        )
    if rows.decode_base is not None and (rows.decode_base < 0).any():
        row = _first(rows.decode_base < 0)
        raise StepError(
            "decode_base", f"row {row} has a negative decode_base, {rows.decode_base[row]}", row
        )


def _num_real(query_lens: IntArray) -> int:
    padding = query_lens == 0
    first = int(padding.argmax())
    if not padding[first:].all():
        raise StepError(
            "padding",
            f"row {first} has no token but is not at the end of the step; padding rows come last",
            first,
        )
    return first


def _check_drafts(rows: Rows, limits: Limits) -> None:
    most = limits.num_spec_tokens
    accepted = rows.num_accepted_tokens
    if accepted is not None and (accepted.min() < 1 or accepted.max() > 1 + most):
        row = _first((accepted < 1) | (accepted > 1 + most))
        raise StepError(
            "num_accepted_tokens",
            f"row {row} accepted {accepted[row]} tokens of its previous step; with"
            f" engine.num_spec_tokens = {most} it must be 1 to {1 + most}",
            row,
        )
    drafts = rows.num_draft_tokens
    if drafts is not None and (drafts.min() < -1 or drafts.max() > most):
        row = _first((drafts < -1) | (drafts > most))
        raise StepError(
            "num_draft_tokens",
            f"row {row} has {drafts[row]} draft tokens; with engine.num_spec_tokens = {most} it"
            f" must be -1 (none) to {most}",
            row,
        )


def check_padding(rows: Rows, num_decodes: int) -> None:
    """Refuse padding rows in a step that has prefills."""
    if num_decodes < rows.num_rows and rows.num_real < rows.num_rows:
        row = rows.num_real
        raise StepError(
            "padding",
            f"row {row} is a padding row in a step with prefills; only steps without prefills are"
            " padded",
            row,
        )


def check_decodable(rows: Rows, num_decodes: int, reason: str) -> None:
    """Refuse a decoding row that was classed as a prefill where the prefill path would be wrong."""
    behind = ~rows.is_prefilling[num_decodes:]
    if behind.any():
        row = num_decodes + _first(behind)
        raise StepError(
            "row_order",
            f"row {row} is decoding but would run as a prefill ({reason}); schedule decodes first,"
            " each with one token and its drafts",
            row,
        )


def check_table(block_table: npt.NDArray[Any], num_slots: int) -> None:
    """Refuse a negative slot, or one at or beyond `num_slots`."""
    if block_table.size == 0:
        return
    unsigned = block_table.view(np.uint32 if block_table.dtype == np.int32 else np.uint64)
    if np.maximum.reduce(unsigned, axis=None) >= num_slots:
        row = _first(((block_table < 0) | (block_table >= num_slots)).any(axis=1))
        values = block_table[row]
        slot = values[_first((values < 0) | (values >= num_slots))]
        what = "is negative" if slot < 0 else f"is outside the pool of {num_slots} slots"
        raise StepError("slot_range", f"row {row} names slot {slot}, which {what}", row)


def check_width(columns: IntArray, extra: int, width: int) -> None:
    """Refuse a block table too narrow for the columns its rows need (`extra` more behind each)."""
    if columns.size and np.maximum.reduce(columns, axis=None) + extra >= width:
        needed = columns.reshape(-1, columns.shape[-1]).max(axis=0) + extra
        row = _first(needed >= width)
        raise StepError(
            "block_table_width",
            f"row {row} needs block table column {needed[row]}, the table has {width} columns",
            row,
        )


def check_not_null(slots: npt.NDArray[Any], row_of: IntArray, what: str) -> None:
    """Refuse the null slot among `slots`; `row_of` names each slot's row."""
    if slots.size and slots.min() == 0:
        row = int(row_of[_first(slots == 0)])
        raise StepError(
            "null_slot", f"row {row} needs a slot to {what}, its block table has the null slot", row
        )


class SlotConflicts:
    """Finds a slot that one row writes and another row reads or writes."""

    def __init__(self) -> None:
        self._owner = np.full(1024, -1, dtype=np.int64)

    def _grow(self, top: int) -> None:
        if top >= len(self._owner):
            self._owner = np.full(max(top + 1, 2 * len(self._owner)), -1, dtype=np.int64)

    def none_shared(self, slots: npt.NDArray[Any], index: IntArray) -> bool:
        """Whether no two rows name one slot, reading or writing; `slots` is (kinds, rows).

        Three array operations: the common case of a decode step, which then needs no closer look.
        """
        wide = slots.astype(np.int64)  # fancy indexing converts narrower indices, slowly, each time
        top = int(np.maximum.reduce(wide, axis=None))
        if top >= _DENSE_SLOTS:
            return False
        self._grow(top)
        owner = self._owner
        owner[wide] = index
        alone = bool(np.logical_and.reduce(owner.take(wide) == index, axis=None))
        owner[wide] = -1
        return alone

    def check(
        self,
        writes: npt.NDArray[Any],
        write_rows: IntArray,
        reads: npt.NDArray[Any],
        read_rows: IntArray,
    ) -> None:
        """Raise `StepError` (`slot_conflict`) naming the second row of the first conflict.

        All four are flat; `*_rows` give each slot's row.
        """
        top = int(max(writes.max(initial=0), reads.max(initial=0)))
        if top >= _DENSE_SLOTS:
            known, writes_at = np.unique(writes, return_inverse=True)
            present = np.isin(reads, known)
            reads, read_rows = reads[present], read_rows[present]
            self._check(writes_at, write_rows, np.searchsorted(known, reads), read_rows, known)
            return
        self._grow(top)
        self._check(writes, write_rows, reads, read_rows, None)

    def _check(
        self,
        writes: npt.NDArray[Any],
        write_rows: IntArray,
        reads: npt.NDArray[Any],
        read_rows: IntArray,
        known: npt.NDArray[Any] | None,
    ) -> None:
        owner = self._owner
        if known is not None:
            self._grow(len(known) - 1)
            owner = self._owner
        owner[writes] = write_rows
        owners = owner[writes]
        readers = owner[reads]
        owner[writes] = -1
        clash = owners != write_rows
        if clash.any():
            at = _first(clash)
            pair = sorted((int(write_rows[at]), int(owners[at])))
            self._raise(writes[at], pair[1], pair[0], "writes", known)
        foreign: BoolArray = (readers != read_rows) & (readers >= 0)
        if foreign.any():
            at = _first(foreign)
            self._raise(reads[at], read_rows[at], readers[at], "reads", known)

    @staticmethod
    def _raise(slot: int, row: int, other: int, verb: str, known: npt.NDArray[Any] | None) -> None:
        slot = int(slot if known is None else known[slot])
        raise StepError(
            "slot_conflict",
            f"row {int(row)} {verb} slot {slot}, which row {int(other)} writes in the same step",
            int(row),
        )


def _first(mask: Any) -> int:
    return int(np.argmax(mask))
