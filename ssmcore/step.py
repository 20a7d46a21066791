"""A step: what the scheduler wants run, as plain host arrays, one entry a row.

`Step` checks form only (types, lengths, integer ranges); the rules that need settings are checked
by `Pipeline.plan` before anything is written. `Rows` is the view of a step that strategies see.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from ssmcore.errors import StepError
from ssmcore.strategies import BoolArray, IntArray

IntLike = Sequence[int] | npt.NDArray[Any]

_NAMES = (
    "query_start_loc",
    "seq_lens",
    "is_prefilling",
    "block_table",
    "decode_base",
    "num_accepted_tokens",
    "num_draft_tokens",
    "prev_last_scheduled_block",
)
_REQUIRED = _NAMES[:4]
_INT32, _INT64, _BOOL = np.dtype(np.int32), np.dtype(np.int64), np.dtype(np.bool_)


class Rows:
    """Rows of a step as host arrays, all int64 and of length R unless said otherwise.

    Attributes:
        query_start_loc: (R + 1,), offsets of the rows' tokens; the first is 0.
        query_lens: tokens scheduled in this step; 0 marks a padding row.
        seq_lens: sequence length after the step.
        computed: tokens computed before the step.
        tokens: (2, R), `computed` and `seq_lens` together.
        is_prefilling: (R,), bool.
        block_table: (R, W), int32 or int64 slots.
        decode_base, num_accepted_tokens, num_draft_tokens, prev_last_scheduled_block: or None.
        num_rows, num_real: rows in all, and those before the padding at the end.
        all_have_prior: every real row has tokens computed before the step.
    """

    __slots__ = (
        "all_have_prior",
        "block_table",
        "computed",
        "decode_base",
        "is_prefilling",
        "num_accepted_tokens",
        "num_draft_tokens",
        "num_real",
        "num_rows",
        "prev_last_scheduled_block",
        "query_lens",
        "query_start_loc",
        "seq_lens",
        "tokens",
    )

    query_start_loc: IntArray
    query_lens: IntArray
    seq_lens: IntArray
    computed: IntArray
    tokens: IntArray
    is_prefilling: BoolArray
    block_table: npt.NDArray[Any]
    decode_base: IntArray | None
    num_accepted_tokens: IntArray | None
    num_draft_tokens: IntArray | None
    prev_last_scheduled_block: IntArray | None
    num_rows: int
    num_real: int
    all_have_prior: bool

    def with_table(self, block_table: npt.NDArray[Any]) -> Rows:
        """The same rows with their states in other slots."""
        rows = Rows()
        for name in self.__slots__:
            setattr(rows, name, getattr(self, name))
        rows.block_table = block_table
        return rows

    def part(self, start: int, stop: int) -> Rows:
        """Rows `start` to `stop` as views; `query_start_loc` is rebased so that the first is 0."""
        if start == 0 and stop == self.num_rows:
            return self
        rows = Rows()
        loc = self.query_start_loc[start : stop + 1]
        rows.query_start_loc = loc - loc[0] if start else loc
        rows.query_lens = self.query_lens[start:stop]
        rows.tokens = self.tokens[:, start:stop]
        rows.computed, rows.seq_lens = rows.tokens
        rows.is_prefilling = self.is_prefilling[start:stop]
        rows.block_table = self.block_table[start:stop]
        for name in _NAMES[4:]:
            values = getattr(self, name)
            setattr(rows, name, None if values is None else values[start:stop])
        rows.num_rows = stop - start
        rows.num_real = min(stop, self.num_real) - start
        rows.all_have_prior = self.all_have_prior
        return rows


@dataclass(frozen=True, slots=True, eq=False)
class Step:
    """One scheduled batch; build it with `Step.of` (any integer sequences) or from a mapping.

    Attributes:
        query_start_loc: (R + 1,), int64.
        seq_lens: (R,), int64.
        is_prefilling: (R,), bool: tokens that must be computed before decoding are still missing.
        block_table: (R, W), int32 or int64 slots; slot 0 is the null slot.
        decode_base: (R,), int64: the anchor, token count at which prefill leaves the state whole.
        num_accepted_tokens: (R,), int64: tokens accepted from the row's previous step.
        num_draft_tokens: (R,), int64: drafts of this step, -1 where the row has none.
        prev_last_scheduled_block: (R,), int64, -1 where unknown.
    """

    query_start_loc: IntArray
    seq_lens: IntArray
    is_prefilling: BoolArray
    block_table: npt.NDArray[Any]
    decode_base: IntArray | None = None
    num_accepted_tokens: IntArray | None = None
    num_draft_tokens: IntArray | None = None
    prev_last_scheduled_block: IntArray | None = None

    def __post_init__(self) -> None:
        """Refuse arrays of a wrong type or length.

        Raises:
            StepError: names the array and, where one row is at fault, the row.
        """
        rows = len(self.seq_lens)
        if len(self.query_start_loc) != rows + 1:
            raise StepError(
                "length",
                f"query_start_loc has {len(self.query_start_loc)} entries for {rows} rows of"
                f" seq_lens; it must have {rows + 1}",
            )
        for name in _NAMES[2:]:
            values = getattr(self, name)
            if values is not None and len(values) != rows:
                raise StepError(
                    "length", f"{name} has {len(values)} rows, seq_lens has {rows}; they must agree"
                )
        if self.block_table.ndim != 2 or self.block_table.dtype not in (_INT32, _INT64):
            raise StepError(
                "type",
                "block_table must be two-dimensional int32 or int64, got "
                f"{self.block_table.ndim}-dimensional {self.block_table.dtype}",
            )
        for name in _NAMES:
            values = getattr(self, name)
            if name == "block_table" or values is None:
                continue
            wanted = _BOOL if name == "is_prefilling" else _INT64
            if values.ndim != 1 or values.dtype != wanted:
                raise StepError(
                    "type",
                    f"{name} must be one-dimensional {wanted}, got "
                    f"{values.ndim}-dimensional {values.dtype}",
                )

    @classmethod
    def of(
        cls,
        query_start_loc: IntLike,
        seq_lens: IntLike,
        is_prefilling: Sequence[bool] | npt.NDArray[Any],
        block_table: Sequence[Sequence[int]] | npt.NDArray[Any],
        decode_base: IntLike | None = None,
        num_accepted_tokens: IntLike | None = None,
        num_draft_tokens: IntLike | None = None,
        prev_last_scheduled_block: IntLike | None = None,
    ) -> Step:
        """Build a step from lists or arrays; integers only, no silent conversion.

        Raises:
            StepError: an entry is no integer (or no boolean), or a table is ragged.
        """

        def optional(name: str, values: IntLike | None) -> IntArray | None:
            return None if values is None else _integers(name, values)

        return cls(
            _integers("query_start_loc", query_start_loc),
            _integers("seq_lens", seq_lens),
            _booleans("is_prefilling", is_prefilling),
            table_of(block_table),
            optional("decode_base", decode_base),
            optional("num_accepted_tokens", num_accepted_tokens),
            optional("num_draft_tokens", num_draft_tokens),
            optional("prev_last_scheduled_block", prev_last_scheduled_block),
        )

    @classmethod
    def from_dict(cls, step: Mapping[str, Any]) -> Step:
        """Build a step from its JSON form; an unknown or missing key is an error.

        Raises:
            StepError: names the key.
        """
        if not isinstance(step, Mapping):
            raise StepError("type", f"step must be an object, got {_kind(step)}")
        for key in step:
            if key not in _NAMES:
                raise StepError(
                    "key", f"step has an unknown key {key!r}; known: {', '.join(_NAMES)}"
                )
        for key in _REQUIRED:
            if step.get(key) is None:
                raise StepError("key", f"step lacks {key!r}")
        return cls.of(**step)

    def to_dict(self) -> dict[str, Any]:
        """The JSON form, absent parts left out."""
        return {
            name: getattr(self, name).tolist() for name in _NAMES if getattr(self, name) is not None
        }

    @property
    def num_rows(self) -> int:
        """Rows of the step, padding included."""
        return len(self.seq_lens)

    def rows(self) -> Rows:
        """The rows as strategies see them; `num_real` counts all until padding is found."""
        rows = Rows()
        loc = self.query_start_loc
        rows.query_start_loc = loc
        rows.query_lens = loc[1:] - loc[:-1]
        rows.tokens = np.empty((2, len(self.seq_lens)), dtype=np.int64)
        rows.computed, rows.seq_lens = rows.tokens
        rows.seq_lens[:] = self.seq_lens
        np.subtract(self.seq_lens, rows.query_lens, out=rows.computed)
        rows.is_prefilling = self.is_prefilling
        rows.block_table = self.block_table
        rows.decode_base = self.decode_base
        rows.num_accepted_tokens = self.num_accepted_tokens
        rows.num_draft_tokens = self.num_draft_tokens
        rows.prev_last_scheduled_block = self.prev_last_scheduled_block
        rows.num_rows = rows.num_real = len(self.seq_lens)
        rows.all_have_prior = False
        return rows


def _kind(value: object) -> str:
    return {bool: "a boolean", str: "text", type(None): "null", dict: "an object"}.get(
        type(value), f"{type(value).__name__}"
    )


def _integers(name: str, values: object) -> IntArray:
    if isinstance(values, np.ndarray):
        if values.dtype.kind not in "iu":
            raise StepError("type", f"{name} must hold integers, got {values.dtype}")
        if values.dtype == np.uint64 and values.size and int(values.max()) > 2**63 - 1:
            raise StepError("type", f"{name} holds an integer beyond 64 bits")
        return values.astype(np.int64, copy=False)
    if not isinstance(values, Sequence) or isinstance(values, str | bytes):
        raise StepError("type", f"{name} must be a list of integers, got {_kind(values)}")
    for row, value in enumerate(values):
        if type(value) is not int and not isinstance(value, np.integer):
            raise StepError("type", f"{name}[{row}] must be an integer, got {_shown(value)}", row)
        if not -(2**63) <= value < 2**63:
            raise StepError("type", f"{name}[{row}] is beyond 64 bits", row)
    return np.array(values, dtype=np.int64)


def _booleans(name: str, values: object) -> BoolArray:
    if isinstance(values, np.ndarray):
        if values.dtype != np.bool_:
            raise StepError("type", f"{name} must hold booleans, got {values.dtype}")
        return values
    if not isinstance(values, Sequence) or isinstance(values, str | bytes):
        raise StepError("type", f"{name} must be a list of booleans, got {_kind(values)}")
    for row, value in enumerate(values):
        if not isinstance(value, bool | np.bool_):
            raise StepError("type", f"{name}[{row}] must be a boolean, got {_shown(value)}", row)
    return np.array(values, dtype=np.bool_)


def table_of(values: object) -> npt.NDArray[Any]:
    """A block table from lists or an array: (rows, W), int32 or int64; ragged rows are refused."""
    if isinstance(values, np.ndarray):
        if values.dtype not in (np.int32, np.int64):
            raise StepError("type", f"block_table must hold int32 or int64, got {values.dtype}")
        return values
    if not isinstance(values, Sequence) or isinstance(values, str | bytes):
        raise StepError("type", f"block_table must be a list of rows, got {_kind(values)}")
    rows = [_integers(f"block_table[{row}]", value) for row, value in enumerate(values)]
    widths = {len(row) for row in rows}
    if len(widths) > 1:
        first = len(rows[0])
        row = next(row for row, value in enumerate(rows) if len(value) != first)
        raise StepError(
            "length",
            f"block_table[{row}] has {len(rows[row])} columns, row 0 has {first}; they must agree",
            row,
        )
    width = widths.pop() if widths else 0
    return np.array(rows, dtype=np.int64).reshape(len(rows), width)


def _shown(value: object) -> str:
    return f"{_kind(value)} ({value!r:.40})" if isinstance(value, float) else _kind(value)
