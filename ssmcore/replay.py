"""The cursor rules of the ReplaySSM family, shared by every algorithm that keeps a ring of inputs.

A row's whole state stands at its anchor (or at the last block boundary after it); from there a ring
of `L` inputs fills, and the `L`-th step flushes. Cursors are a function of token counts alone, so
nothing is read back from a device.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt
from pydantic import Field as Option

from ssmcore.blocks import constant, remainder
from ssmcore.step import Rows
from ssmcore.strategies import (
    BoolArray,
    CacheMode,
    Conflict,
    CreateContext,
    DecodeInputs,
    Field,
    IntArray,
    MixerShape,
    Selection,
    SlotTensor,
    StrategyOptions,
)
from ssmcore.validation import least

if TYPE_CHECKING:
    import torch

    from ssmcore.plan import DecodePlan

MAX_BUFFER_LEN = 64


class Cursors(NamedTuple):
    """Per decode row: pending ring entries before the step, and whether the step flushes."""

    write_pos: IntArray
    is_flush: BoolArray


def steps_since_anchor(rows: Rows, cache: CacheMode) -> IntArray:
    """Tokens decoded since the anchor or the last boundary after it; negative for a leftover row.

    A leftover is a one-token prompt tail that runs as a decode, before the anchor is reached.
    """
    boundary = cache.last_boundary(rows.computed)
    return _steps_since(rows, boundary)


def _steps_since(rows: Rows, boundary: IntArray | None) -> IntArray:
    base = rows.decode_base
    if base is None:  # refused when the step is validated
        raise ValueError("decode_base is needed")
    return rows.computed - (base if boundary is None else np.maximum(base, boundary))


def ring_cursors(rows: Rows, cache: CacheMode, buffer_len: int) -> Cursors:
    """Cursors of a ring of `buffer_len` entries (semantics of `replay-torch` and `replay-triton`).

    `write_pos = steps mod L`, flush when `write_pos == L - 1`, when the step completes a block, or
    when the row is a leftover (then `write_pos = 0`). Padding rows: 0, no flush.
    """
    boundaries = cache.last_boundary(rows.tokens)
    before, after = (None, None) if boundaries is None else boundaries
    steps = _steps_since(rows, before)
    write_pos = remainder(steps, buffer_len)
    is_flush = write_pos == constant(buffer_len - 1)
    if least(steps) < 0:
        leftover = steps < 0
        write_pos[leftover] = 0
        is_flush |= leftover
    if after is not None:
        is_flush |= after == rows.seq_lens
    if rows.num_real < rows.num_rows:
        write_pos[rows.num_real :] = 0
        is_flush[rows.num_real :] = False
    return Cursors(write_pos, is_flush)


class ReplayOptions(StrategyOptions):
    """Options of the algorithms that keep a ring of inputs."""

    buffer_len: int = Option(default=16, ge=1, le=MAX_BUFFER_LEN, strict=True)
    """Steps from one write of the whole state to the next; entries of the ring."""


class RingReplay:
    """Everything of a ring-keeping algorithm but its kernel, which subclasses name.

    Per slot and layer it keeps `ring_x`: (L, heads, headdim), activation dtype; `ring_dt`: (L,
    heads), float32, after bias, softplus and limit; `ring_B`: (L, groups, dstate), activation
    dtype.
    """

    fields: tuple[Field, ...] = (Field("write_pos"), Field("is_flush", "bool", pad=False))
    needs_decode_base = True
    keeps_pending_inputs = True
    max_draft_tokens: int | None = 0
    exact = True
    error_bound: float | None = None

    def __init__(self, options: ReplayOptions, context: CreateContext) -> None:
        self.buffer_len = options.buffer_len

    def check(self, selection: Selection) -> Conflict | None:
        """Refuses speculative tokens: a ring entry cannot be rolled back yet."""
        return refuse_drafts(selection)

    def plan_fields(
        self, rows: Rows, cache: CacheMode, out: Mapping[str, npt.NDArray[Any]]
    ) -> IntArray | None:
        """Fill `write_pos` and `is_flush`; the state lags by the ring's pending entries."""
        cursors = ring_cursors(rows, cache, self.buffer_len)
        out["write_pos"][:] = cursors.write_pos
        out["is_flush"][:] = cursors.is_flush
        return cursors.write_pos

    def kernel(self) -> Callable[..., torch.Tensor]:
        """A function that takes what `replay_state_update` of the reference kernels takes."""
        raise NotImplementedError

    def update(
        self, inputs: DecodeInputs, slots: Mapping[str, torch.Tensor], plan: DecodePlan
    ) -> torch.Tensor:
        """One token a row."""
        return self.kernel()(
            inputs.x,
            inputs.dt,
            inputs.A,
            inputs.B,
            inputs.C,
            D=inputs.D,
            dt_bias=inputs.dt_bias,
            dt_limit=inputs.dt_limit,
            state=slots["state"],
            ring_x=slots["ring_x"],
            ring_dt=slots["ring_dt"],
            ring_B=slots["ring_B"],
            state_read_slots=plan.state_read_slots,
            write_slots=plan.write_slots,
            write_pos=plan.tensor("write_pos"),
            is_flush=plan.tensor("is_flush"),
        )

    def slot_tensors(self, mixer: MixerShape) -> tuple[SlotTensor, ...]:
        """The ring."""
        length = self.buffer_len
        return (
            SlotTensor("ring_x", (length, mixer.heads, mixer.headdim), mixer.activation_dtype),
            SlotTensor("ring_dt", (length, mixer.heads), "float32"),
            SlotTensor("ring_B", (length, mixer.groups, mixer.dstate), mixer.activation_dtype),
        )


def refuse_drafts(selection: Selection) -> Conflict | None:
    """The conflict of an algorithm that keeps pending inputs with speculative tokens."""
    drafts = selection.limits.num_spec_tokens
    if not drafts:
        return None
    return Conflict(
        setting=f"decode.name = {selection.names['decode']!r}",
        other=f"engine.num_spec_tokens = {drafts}",
        reason="a rejected draft cannot be taken back out of the ring",
        instead="decode.name = 'baseline', or engine.num_spec_tokens = 0",
    )
