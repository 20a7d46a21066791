"""The four strategies: what each may be asked, and the typed record a plugin offers it with.

A plugin returns records from its hooks (`ssmcore.hookspecs`); a record names the strategy,
validates its options and creates one plain object that implements a protocol of this page.
Strategies know nothing of engines: they see rows of a step as host arrays and fill the host views
of fields that they declared. They are asked whether they can live with the others; they never guess
from names.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Generic, Literal, NamedTuple, Protocol, TypeVar

import numpy as np
import numpy.typing as npt
from pydantic import BaseModel, ConfigDict

if TYPE_CHECKING:
    import torch

    from ssmcore.plan import DecodePlan
    from ssmcore.step import Rows

Slot = Literal["classifier", "cache", "decode", "graph"]
SLOTS: tuple[Slot, ...] = ("classifier", "cache", "decode", "graph")

IntArray = npt.NDArray[np.int64]
BoolArray = npt.NDArray[np.bool_]


class StrategyOptions(BaseModel):
    """Base of a strategy's options; they stand flat beside its name in the configuration file.

    Types are strict: `true` is not 1, and text is not a number. A field may say `strict=False`.
    """

    model_config = ConfigDict(
        strict=True, extra="forbid", frozen=True, use_attribute_docstrings=True
    )


@dataclass(frozen=True, slots=True)
class Field:
    """One number (or a few) per row that a strategy adds to the plan.

    `pad` is what padding rows hold in a plan for a captured graph. `shape` is the trailing shape of
    one row's value. Field names are unique within the part of the plan that they belong to.
    """

    name: str
    dtype: str = "int32"
    shape: tuple[int, ...] = ()
    pad: int | float | bool = 0


@dataclass(frozen=True, slots=True)
class SlotTensor:
    """A tensor of the state pool: `shape` is one slot's, `dtype` a torch dtype's name."""

    name: str
    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True, slots=True)
class Limits:
    """The sizes of the engine that a plan depends on; all in rows or tokens."""

    max_num_seqs: int = 64
    max_model_len: int = 8192
    max_num_batched_tokens: int = 4096
    num_spec_tokens: int = 0
    chunk_size: int = 256


@dataclass(frozen=True, slots=True)
class MixerShape:
    """Sizes of one Mamba-2 mixer layer, and the dtypes (torch names) of what it keeps."""

    heads: int
    headdim: int
    dstate: int
    groups: int
    d_conv: int
    activation_dtype: str = "float32"
    conv_dtype: str = "float32"
    state_dtype: str = "float32"

    @property
    def d_inner(self) -> int:
        """Channels of x and z: heads * headdim."""
        return self.heads * self.headdim

    @property
    def conv_dim(self) -> int:
        """Channels that pass the convolution: x, B and C."""
        return self.d_inner + 2 * self.groups * self.dstate


@dataclass(frozen=True, slots=True)
class CreateContext:
    """What a strategy may know when it is created: sizes only, nothing of its partners."""

    limits: Limits


@dataclass(frozen=True, slots=True)
class Selection:
    """The four chosen strategies, as each one's `check` sees them.

    `running` is False when only plans are wanted; then `device` and `mixer` are None and a strategy
    refuses only combinations that have no plan. `notes` are lines to tell a person at start-up.
    """

    classifier: BatchClassifier
    cache: CacheMode
    decode: DecodeAlgorithm
    graph: GraphPadding
    names: Mapping[str, str]
    limits: Limits
    running: bool = False
    device: str | None = None
    mixer: MixerShape | None = None
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Conflict:
    """Why a strategy cannot live with another setting: both settings, the reason, a way out."""

    setting: str
    other: str
    reason: str
    instead: str


class Strategy(Protocol):
    """What every strategy answers, whatever its slot.

    An attribute `start_up_notes: tuple[str, ...]`, if it has one, is told to a person at start-up.
    """

    def check(self, selection: Selection) -> Conflict | None:
        """Say why this strategy cannot live with the rest of the selection, or None."""
        ...


class DraftColumns(NamedTuple):
    """Block table columns of rows that keep one state for each of `1 + S` tokens, all (rows,).

    The state before the step stands in column `read_first + num_accepted_tokens - 1`; the one after
    the step's token `j` goes to `write_first + j`. Columns `needed_first` to `needed_last` must
    hold slots.
    """

    read_first: IntArray
    write_first: IntArray
    needed_first: IntArray
    needed_last: IntArray


class BatchClassifier(Strategy, Protocol):
    """Splits a step into a leading run of decode rows and the prefill rows behind it."""

    def num_decodes(self, rows: Rows) -> int:
        """Return how many leading rows of the step are decodes (padding rows included)."""
        ...


class CacheMode(Strategy, Protocol):
    """Says in which column of a row's block table each state stands.

    Columns are those of `Step.block_table`. Arrays of token counts are int64 and so are the columns
    that come back.

    Attributes:
        fields: per-row fields of the plan's part `cache`, over all rows of the step; () if none.
        block_size: tokens of a block, or None where a row has one block for its whole life.
        whole_rows: state_indices carry the whole block table row rather than the 1 + S columns, and
            prefill rows carry num_computed_tokens.
        reuses_states: states at block ends may be shared between requests (prefix cache).
    """

    fields: tuple[Field, ...]
    block_size: int | None
    whole_rows: bool
    reuses_states: bool

    def table_width(self, max_tokens: int) -> int:
        """Columns a block table needs for rows of up to `max_tokens` tokens, 1 + S included."""
        ...

    def column(self, tokens: IntArray) -> IntArray:
        """Column of the state after `tokens` tokens of the row (0 for none at all)."""
        ...

    def last_boundary(self, tokens: IntArray) -> IntArray | None:
        """Greatest boundary at most `tokens` at which a whole state is always written.

        None where a row has no such boundary. A ring restarts there.
        """
        ...

    def state_writes(self, rows: Rows) -> tuple[IntArray, IntArray]:
        """All states that prefill rows write, in row order: `(row, tokens)` of each.

        `row` counts within `rows`; `tokens` is the sequence length after which the state stands.
        Each row's last state (after `seq_lens`) is there, last of its row.
        """
        ...

    def draft_columns(self, rows: Rows) -> DraftColumns:
        """Columns of decode rows that verify drafts; asked only with speculative tokens."""
        ...

    def columns_written(self, computed: int, seq_len: int) -> range:
        """Columns that must hold slots of the row's own for a step from `computed` to `seq_len`.

        `S` further ones for drafts are not counted.
        """
        ...

    def boundaries(self, max_tokens: int) -> Sequence[int]:
        """Token counts up to `max_tokens` at which a whole state may be reused, ascending."""
        ...

    def published(self, computed: int, seq_len: int) -> Sequence[int]:
        """Boundaries at which a step from `computed` to `seq_len` leaves a whole state, ascending.

        The state after `p` tokens stands in column `column(p)`.
        """
        ...

    def prefill_end(self, computed: int, limit: int, target: int) -> int:
        """Where a prefill step should end: the sequence length after it, `computed < end <= limit`.

        `limit` is what the token budget allows, `target` where the row's prefill is complete.
        """
        ...

    def plan_fields(self, rows: Rows, out: Mapping[str, npt.NDArray[Any]]) -> None:
        """Fill the host views of `fields` for all rows of the step."""
        ...

    def describe(
        self, rows: Rows, num_decodes: int, fields: Mapping[str, npt.NDArray[Any]]
    ) -> dict[str, Any] | None:
        """The part `cache` of the printed plan, or None if this mode has none."""
        ...


class DecodeAlgorithm(Strategy, Protocol):
    """One decode step of the recurrence, and what it needs to know of each row.

    Attributes:
        fields: per-decode-row fields of the plan's part `decode`; () if none.
        needs_decode_base: a step without `decode_base` is refused.
        keeps_pending_inputs: a row's whole state may lag behind its tokens, so a decoding row must
            never take the prefill path.
        max_draft_tokens: draft tokens a row that it can verify in one step (0: none).
        exact: gives the same tokens as the plain recurrence in float32.
        error_bound: if not exact, the greatest relative error of an output against float64.
    """

    fields: tuple[Field, ...]
    needs_decode_base: bool
    keeps_pending_inputs: bool
    max_draft_tokens: int | None
    exact: bool
    error_bound: float | None

    def plan_fields(
        self, rows: Rows, cache: CacheMode, out: Mapping[str, npt.NDArray[Any]]
    ) -> IntArray | None:
        """Fill the host views of `fields` for the decode rows.

        Returns the lag of each row: how many tokens before this step's the whole state stands that
        the row reads, or None when it never lags.
        """
        ...

    def slot_tensors(self, mixer: MixerShape) -> tuple[SlotTensor, ...]:
        """What a slot keeps per layer besides the conv state and the SSM state."""
        ...

    def update(
        self, inputs: DecodeInputs, slots: Mapping[str, torch.Tensor], plan: DecodePlan
    ) -> torch.Tensor:
        """Run one decode step of one layer; update the slots in place.

        `slots` maps tensor names (`state` and those of `slot_tensors`) to one layer's
        `(slots, ...)` tensors. Returns y: (tokens, heads, headdim), activation dtype; padding rows
        give zero and touch no slot.
        """
        ...


class GraphPadding(Strategy, Protocol):
    """Chooses the row counts that CUDA graphs are captured for and which of them a step takes.

    Attributes:
        sizes: row counts to capture, ascending; () if graphs are not used.
    """

    sizes: tuple[int, ...]

    def padded_rows(self, num_rows: int) -> int | None:
        """Row count of the graph for a step of `num_rows` decode rows, None to run eagerly."""
        ...


@dataclass(frozen=True, slots=True)
class DecodeInputs:
    """One layer's inputs of a decode step.

    x: (tokens, heads, headdim), activation dtype; dt: (tokens, heads), activation dtype, raw;
    B, C: (tokens, groups, dstate), activation dtype; A, D, dt_bias: (heads,), float32;
    dt_limit: bounds of dt after softplus.
    """

    x: torch.Tensor
    dt: torch.Tensor
    A: torch.Tensor
    B: torch.Tensor
    C: torch.Tensor
    D: torch.Tensor
    dt_bias: torch.Tensor
    dt_limit: tuple[float, float]


S_co = TypeVar("S_co", covariant=True)


def always_available(device: str) -> str | None:
    """The `unavailable` of a strategy that runs on every device."""
    return None


@dataclass(frozen=True, slots=True)
class StrategyRecord(Generic[S_co]):
    """What a plugin offers: a name, one line of help, options, and how to create the strategy.

    `unavailable(device)` says in a sentence why the strategy cannot run on `device` ("cpu" or
    "cuda") of this machine and what to install, or None. It is asked only when something is to run.
    `preference` orders candidates when the configuration names none: the greatest that is available
    and accepted by `check` is taken.
    """

    slot: ClassVar[Slot]
    name: str
    summary: str
    options: type[StrategyOptions]
    create: Callable[[Any, CreateContext], S_co]
    unavailable: Callable[[str], str | None] = always_available
    preference: int = 0
    docs: str = field(default="", compare=False)


class BatchClassifierRecord(StrategyRecord[BatchClassifier]):
    """Offers a batch classifier."""

    slot = "classifier"


class CacheModeRecord(StrategyRecord[CacheMode]):
    """Offers a cache mode."""

    slot = "cache"


class DecodeAlgorithmRecord(StrategyRecord[DecodeAlgorithm]):
    """Offers a decode algorithm."""

    slot = "decode"


class GraphPaddingRecord(StrategyRecord[GraphPadding]):
    """Offers a graph padding."""

    slot = "graph"
