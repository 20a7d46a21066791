"""Which slots each row of a step reads and writes, looked up in its block table and checked.

Read and write slots are separate, so crossing a block never copies a state: a row reads the slot
where its last whole state stands and writes the slot of the block it is in.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from ssmcore.blocks import constant, counting
from ssmcore.step import Rows
from ssmcore.strategies import CacheMode, IntArray
from ssmcore.validation import SlotConflicts, SlotUse, check_width


class DecodeSlots:
    """Slots of the decode rows.

    Attributes:
        conv_read, state_read: (rows,), slots of the conv state and of the last whole SSM state.
        write: (rows,), or (rows, 1 + S) with speculative tokens.
        written: slots that real rows need for writing.
    """

    __slots__ = ("_together", "conv_read", "rows", "state_read", "write", "written")

    def __init__(
        self, rows: Rows, cache: CacheMode, num_spec_tokens: int, lag: IntArray | None
    ) -> None:
        self.rows = rows
        if num_spec_tokens:
            self._look_up_drafts(cache, num_spec_tokens)
            return
        if lag is None:
            tokens = rows.tokens
        else:
            tokens = np.empty((3, rows.num_rows), dtype=np.int64)
            tokens[::2] = rows.tokens
            np.subtract(rows.computed, lag, out=tokens[1])
        columns = cache.column(tokens)
        check_width(columns, 0, rows.block_table.shape[1])
        slots = look_up(rows.block_table, counting(rows.num_rows), columns)
        self.conv_read, self.state_read, self.write = slots[0], slots[-2], slots[-1]
        real = rows.num_real
        self.written = self.write[:real], counting(real)
        self._together: IntArray | None = slots

    def _look_up_drafts(self, cache: CacheMode, num_spec_tokens: int) -> None:
        rows = self.rows
        table = rows.block_table
        index = counting(rows.num_rows)
        draft = cache.draft_columns(rows)
        accepted = rows.num_accepted_tokens
        read = draft.read_first if accepted is None else draft.read_first + accepted - 1
        check_width(np.stack([read, draft.write_first + num_spec_tokens]), 0, table.shape[1])
        self.conv_read = self.state_read = look_up(table, index, read)
        self._together = None
        writes = draft.write_first[:, None] + np.arange(1 + num_spec_tokens)
        self.write = look_up(table, index[:, None], writes)
        real = rows.num_real
        counts = (draft.needed_last - draft.needed_first + 1)[:real]
        row = index[:real].repeat(counts)
        nth = np.arange(len(row)) - (counts.cumsum() - counts).repeat(counts)
        self.written = look_up(table, row, draft.needed_first[row] + nth), row

    def uses(self) -> list[SlotUse]:
        """Slots that real rows read and write."""
        rows, real = self.rows, self.rows.num_real
        if self._together is not None and rows.all_have_prior:
            return [(self._together[:, :real], counting(real))]
        uses = [self.written, _read(rows, self.conv_read, 0)]
        if self.state_read is not self.conv_read:
            uses.append(_read(rows, self.state_read, 0))
        return uses

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
        columns = cache.column(rows.tokens)
        check_width(columns, num_spec_tokens, table.shape[1])
        self.rows = rows
        self.read, self.write = look_up(table, counting(rows.num_rows), columns)
        self.write_rows, self.write_tokens = cache.state_writes(rows)
        self.write_slots = look_up(table, self.write_rows, cache.column(self.write_tokens))

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
    top: int,
) -> None:
    """Refuse null slots where rows need one, and slots that rows would share; none is beyond `top`.

    Raises:
        StepError: `null_slot` or `slot_conflict`, naming the row.
    """
    writes: list[SlotUse] = []
    uses: list[SlotUse] = []
    if decode is not None:
        writes.append(decode.written)
        uses += decode.uses()
    if prefill is not None:
        written = prefill.write_slots, prefill.write_rows + num_decodes
        writes.append(written)
        uses += [written, _read(prefill.rows, prefill.read, num_decodes)]
    conflicts.check(writes, uses, top)


def look_up(table: npt.NDArray[Any], rows: IntArray, columns: IntArray) -> IntArray:
    """`table[rows, columns]` as int64, by flat offsets: two index arrays cost far more than one."""
    offsets = rows * constant(table.shape[1]) + columns
    slots: IntArray = table.reshape(-1).take(offsets).astype(np.int64, copy=False)
    return slots


def _read(rows: Rows, slots: IntArray, first_row: int) -> SlotUse:
    """The slots that real rows with prior tokens read."""
    real = rows.num_real
    index = counting(first_row + real)[first_row:]
    if rows.all_have_prior:
        return slots[:real], index
    with_prior = rows.computed[:real] > constant(0)
    return slots[:real][with_prior], index[with_prior]
