"""The rules a step must keep, each refused with the row at fault before anything is written.

The common case passes on a few reductions; only a failing step pays for finding the row.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from ssmcore.errors import StepError
from ssmcore.step import Rows
from ssmcore.strategies import IntArray, Limits

MAX_SLOTS = 2**31
"""Slots are int32 on the device."""

MAX_STEP_TOKENS = 2**31 - 1

_DENSE_SLOTS = 2**22
"""Beyond it an array over all slots would cost too much memory."""

_UNOWNED = -1
_NOBODY = 2**62
"""Owner of the null slot: whoever names it is refused."""


def check_rows(rows: Rows, limits: Limits) -> None:
    """Refuse a step whose counts cannot be; sets `rows.num_real` and `rows.all_have_prior`.

    Raises:
        StepError: `empty`, `query_start_loc`, `max_num_seqs`, `padding`, `seq_len`,
            `max_model_len`, `num_accepted_tokens`, `num_draft_tokens`, `decode_base`,
            `prev_last_scheduled_block` or `too_many_tokens`.
    """
    num_rows = rows.num_rows
    if num_rows == 0:
        raise StepError("empty", "the step has no rows")
    query_lens, loc = rows.query_lens, rows.query_start_loc
    shortest, least_computed = least(query_lens), least(rows.computed)
    if (
        loc.item(0) != 0
        or shortest < 0
        or not 0 < loc.item(num_rows) <= MAX_STEP_TOKENS
        or num_rows > limits.max_num_seqs
        or least_computed < 0
        or least(rows.seq_lens) < 0  # differences with far negative lengths would wrap around
        or rows.seq_lens.item(rows.seq_lens.argmax()) > limits.max_model_len
        or (rows.decode_base is not None and least(rows.decode_base) < 0)
    ):
        _refuse_counts(rows, limits)
    rows.all_have_prior = least_computed > 0
    if shortest == 0:
        rows.num_real = _num_real(query_lens)
        rows.all_have_prior = least(rows.computed[: rows.num_real]) > 0
    if rows.num_accepted_tokens is not None or rows.num_draft_tokens is not None:
        _check_drafts(rows, limits)
    previous = rows.prev_last_scheduled_block
    if previous is not None and previous.max() >= MAX_SLOTS:
        row = _first(previous >= MAX_SLOTS)
        raise StepError(
            "prev_last_scheduled_block", f"row {row} cannot have a block {previous[row]}", row
        )


def least(values: npt.NDArray[Any]) -> int:
    """Least entry; by its index, which on short arrays is a third of the cost of a reduction."""
    return int(values.item(values.argmin()))


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
    flags = rows.is_prefilling[num_decodes:]
    if np.count_nonzero(flags) < len(flags):
        row = num_decodes + _first(~flags)
        raise StepError(
            "row_order",
            f"row {row} is decoding but would run as a prefill ({reason}); schedule decodes first,"
            " each with one token and its drafts",
            row,
        )


def check_table(block_table: npt.NDArray[Any], num_slots: int) -> int:
    """Refuse a negative slot, or one at or beyond `num_slots`; return the greatest slot."""
    if block_table.size == 0:
        return 0
    # seen as unsigned, a negative slot is beyond every pool
    unsigned = block_table.view(np.uint32 if block_table.dtype == np.int32 else np.uint64)
    top = int(unsigned.item(unsigned.argmax()))
    if top >= num_slots:
        row = _first(((block_table < 0) | (block_table >= num_slots)).any(axis=1))
        values = block_table[row]
        slot = values[_first((values < 0) | (values >= num_slots))]
        what = "is negative" if slot < 0 else f"is outside the pool of {num_slots} slots"
        raise StepError("slot_range", f"row {row} names slot {slot}, which {what}", row)
    return top


def check_width(columns: IntArray, extra: int, width: int) -> None:
    """Refuse a block table too narrow for the columns its rows need (`extra` more behind each)."""
    if columns.size and columns.item(columns.argmax()) + extra >= width:
        needed = columns.reshape(-1, columns.shape[-1]).max(axis=0) + extra
        row = _first(needed >= width)
        raise StepError(
            "block_table_width",
            f"row {row} needs block table column {needed[row]}, the table has {width} columns",
            row,
        )


SlotUse = tuple[IntArray, IntArray]
"""Slots that rows name, (rows,) or (kinds, rows), and the number of each row, (rows,)."""


class SlotConflicts:
    """Finds null slots, and slots that one row writes and another row reads or writes."""

    def __init__(self) -> None:
        self._owner = np.full(1024, _UNOWNED, dtype=np.int64)

    def check(self, writes: Sequence[SlotUse], uses: Sequence[SlotUse], top: int) -> None:
        """Raise `StepError` (`null_slot`, `slot_conflict`) naming the row of the first conflict.

        `uses` are all slots that rows read or write, those of `writes` among them; `top` bounds
        them.
        """
        if top >= _DENSE_SLOTS:
            _refuse_shared(writes, uses)
            return
        owner = self._owner
        if top >= len(owner):
            size = max(top + 1, 2 * len(owner))
            owner = self._owner = np.full(size, _UNOWNED, dtype=np.int64)
        for slots, rows in writes:
            owner[slots] = rows
        owner[0] = _NOBODY
        sound = True
        for slots, rows in uses:
            sound = sound and _sound(owner.take(slots), rows)
        for slots, _ in writes:
            owner[slots] = _UNOWNED
        if not sound:
            _refuse_shared(writes, uses)


def _sound(owners: IntArray, rows: IntArray) -> bool:
    """Whether slots are their rows' own or nobody's; most are their own."""
    foreign = owners != rows
    return not np.count_nonzero(foreign) or owners[foreign].max() == _UNOWNED


def _refuse_shared(writes: Sequence[SlotUse], uses: Sequence[SlotUse]) -> None:
    """Name the first null slot, else the first slot that two rows share, if there is one."""
    slots, rows = _flat(writes)
    used, used_rows = _flat(uses)
    _check_not_null(slots, rows, "write its state to")
    _check_not_null(used, used_rows, "read its state from")
    known, nth = np.unique(slots, return_inverse=True)
    owner = np.empty(len(known), dtype=np.int64)
    owner[nth] = rows
    owners = owner[nth]
    clash = owners != rows
    if clash.any():
        at = _first(clash)
        first, second = sorted((int(rows[at]), int(owners[at])))
        _refuse_slot(slots[at], second, first, "writes")
    at_known = np.minimum(np.searchsorted(known, used), len(known) - 1)
    foreign = (known[at_known] == used) & (owner[at_known] != used_rows)
    if foreign.any():
        at = _first(foreign)
        _refuse_slot(used[at], used_rows[at], owner[at_known[at]], "reads")


def _flat(uses: Sequence[SlotUse]) -> tuple[IntArray, IntArray]:
    if not uses:
        return np.empty(0, dtype=np.int64), np.empty(0, dtype=np.int64)
    all_rows = [np.broadcast_to(rows, slots.shape).ravel() for slots, rows in uses]
    return np.concatenate([slots.ravel() for slots, _ in uses]), np.concatenate(all_rows)


def _check_not_null(slots: IntArray, rows: IntArray, what: str) -> None:
    null = slots == 0
    if null.any():
        row = int(rows[_first(null)])
        raise StepError(
            "null_slot", f"row {row} needs a slot to {what}, its block table has the null slot", row
        )


def _refuse_slot(slot: int, row: int, other: int, verb: str) -> None:
    raise StepError(
        "slot_conflict",
        f"row {int(row)} {verb} slot {int(slot)}, which row {int(other)} writes in the same step",
        int(row),
    )


def _first(mask: Any) -> int:
    return int(np.argmax(mask))
