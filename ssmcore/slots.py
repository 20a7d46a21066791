"""Which slots each row of a step reads and writes, looked up in its block table and checked.

Read and write slots are separate, so crossing a block never copies a state: a row reads the slot
where its last whole state stands and writes the slot of the block it is in.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from ssmcore.step import Rows
from ssmcore.strategies import CacheMode, IntArray
from ssmcore.validation import SlotConflicts, check_not_null, check_width

Slots = npt.NDArray[Any]


class DecodeSlots:
    """Slots of the decode rows.

    Attributes:
        conv_read, state_read: (rows,), slots of the conv state and of the last whole SSM state.
        write: (rows,), or (rows, 1 + S) with speculative tokens.
        together: (3, rows) of all three where each is one slot a row, else None.
        index: (rows,), 0, 1, 2...
    """

    __slots__ = (
        "_needed",
        "_needed_rows",
        "conv_read",
        "index",
        "rows",
        "state_read",
        "together",
        "write",
    )

    def __init__(
        self, rows: Rows, cache: CacheMode, num_spec_tokens: int, lag: IntArray | None
    ) -> None:
        table = rows.block_table
        index = np.arange(rows.num_rows)
        real = rows.num_real
        self.rows = rows
        self.index = index
        self.together: Slots | None = None
        if num_spec_tokens == 0:
            tokens = np.empty((3, rows.num_rows), dtype=np.int64)
            tokens[0] = rows.computed
            np.subtract(rows.computed, 0 if lag is None else lag, out=tokens[1])
            tokens[2] = rows.seq_lens
            columns = cache.column(tokens)
            check_width(columns, 0, table.shape[1])
            self.together = table[index, columns]
            self.conv_read, self.state_read, self.write = self.together
            self._needed, self._needed_rows = self.write[:real], index[:real]
            return
        draft = cache.draft_columns(rows)
        accepted = rows.num_accepted_tokens
        read = draft.read_first if accepted is None else draft.read_first + accepted - 1
        check_width(np.stack([read, draft.write_first + num_spec_tokens]), 0, table.shape[1])
        self.conv_read = self.state_read = table[index, read]
        writes = draft.write_first[:, None] + np.arange(1 + num_spec_tokens)
        self.write = table[index[:, None], writes]
        counts = (draft.needed_last - draft.needed_first + 1)[:real]
        row = np.repeat(index[:real], counts)
        nth = np.arange(len(row)) - np.repeat(np.cumsum(counts) - counts, counts)
        self._needed, self._needed_rows = table[row, draft.needed_first[row] + nth], row

    def written(self) -> tuple[Slots, IntArray]:
        """Slots that real rows need for writing, and the row of each."""
        return self._needed, self._needed_rows

    def fill(self, cache: CacheMode, out: Mapping[str, npt.NDArray[Any]]) -> None:
        """Fill the slot fields of the part `decode`; padding rows get the null slot."""
        out["conv_read_slots"][:] = self.conv_read
        out["state_read_slots"][:] = self.state_read
        write = out["write_slots"]
        state_indices = out["state_indices"]
        if self.write.ndim == 1:
            write[:] = self.write
            first = self.write[:, None]
        else:
            write[:] = self.write if write.ndim == 2 else self.write[:, 0]
            first = self.write
        state_indices[:] = self.rows.block_table if cache.whole_rows else first
        padding = self.rows.num_real
        if padding < self.rows.num_rows:
            for name in ("conv_read_slots", "state_read_slots", "write_slots", "state_indices"):
                out[name][padding:] = 0


class PrefillSlots:
    """Slots of the prefill rows, and the states that they write.

    Attributes:
        read, write: (rows,), slot of the states before the step and after it.
        write_rows, write_tokens: (writes,), row and sequence length of each written state.
        write_slots: (writes,), slot of each written state.
    """

    __slots__ = ("read", "rows", "write", "write_rows", "write_slots", "write_tokens")

    def __init__(self, rows: Rows, cache: CacheMode, num_spec_tokens: int) -> None:
        table = rows.block_table
        index = np.arange(rows.num_rows)
        columns = cache.column(np.stack([rows.computed, rows.seq_lens]))
        check_width(columns, num_spec_tokens, table.shape[1])
        self.rows = rows
        self.read, self.write = table[index, columns]
        self.write_rows, self.write_tokens = cache.state_writes(rows)
        self.write_slots = table[self.write_rows, cache.column(self.write_tokens)]

    def fill(self, cache: CacheMode, out: Mapping[str, npt.NDArray[Any]]) -> None:
        """Fill the slot fields of the part `prefill`."""
        out["conv_read_slots"][:] = self.read
        out["state_read_slots"][:] = self.read
        out["write_slots"][:] = self.write
        out["state_indices"][:] = self.rows.block_table if cache.whole_rows else self.write
        out["state_write_slots"][:] = self.write_slots


def check_slots(
    decode: DecodeSlots | None,
    prefill: PrefillSlots | None,
    num_decodes: int,
    conflicts: SlotConflicts,
) -> None:
    """Refuse null slots where rows need one, and slots that rows would share.

    Raises:
        StepError: `null_slot` or `slot_conflict`, naming the row.
    """
    if decode is not None and prefill is None and _plainly_sound(decode, conflicts):
        return
    writes: list[Slots] = []
    write_rows: list[IntArray] = []
    reads: list[Slots] = []
    read_rows: list[IntArray] = []
    if decode is not None:
        real = decode.rows.num_real
        written, row = decode.written()
        writes.append(written)
        write_rows.append(row)
        _add_reads(decode.rows, decode.conv_read[:real], 0, reads, read_rows)
        if decode.state_read is not decode.conv_read:
            _add_reads(decode.rows, decode.state_read[:real], 0, reads, read_rows)
    if prefill is not None:
        writes.append(prefill.write_slots)
        write_rows.append(prefill.write_rows + num_decodes)
        _add_reads(prefill.rows, prefill.read, num_decodes, reads, read_rows)
    all_writes, all_write_rows = _joined(writes), _joined(write_rows)
    all_reads, all_read_rows = _joined(reads), _joined(read_rows)
    check_not_null(all_writes, all_write_rows, "write its state to")
    check_not_null(all_reads, all_read_rows, "read its state from")
    conflicts.check(all_writes, all_write_rows, all_reads, all_read_rows)


def _plainly_sound(decode: DecodeSlots, conflicts: SlotConflicts) -> bool:
    """Whether decode rows need no closer look: no null slot, no slot named by two rows."""
    slots = decode.together
    if slots is None or not decode.rows.all_have_prior:
        return False
    real = decode.rows.num_real
    if real < decode.rows.num_rows:
        slots = slots[:, :real]
    if np.minimum.reduce(slots, axis=None) == 0:
        return False
    return conflicts.none_shared(slots, decode.index[:real])


def _add_reads(
    rows: Rows, slots: Slots, first_row: int, reads: list[Slots], read_rows: list[IntArray]
) -> None:
    """Add the slots that rows with prior tokens read, with their row numbers in the step."""
    index = np.arange(first_row, first_row + len(slots))
    computed = rows.computed[: len(slots)]
    if len(slots) and computed.min() == 0:
        with_prior = computed > 0
        slots, index = slots[with_prior], index[with_prior]
    reads.append(slots)
    read_rows.append(index)


def _joined(parts: list[Any]) -> npt.NDArray[Any]:
    joined: npt.NDArray[Any] = parts[0] if len(parts) == 1 else np.concatenate(parts)
    return joined
