"""Decode algorithm `replay-flashinfer`: ReplaySSM through FlashInfer's `checkpointing_ssu`.

A flush there folds the old entries only, so the whole state lags at least one token and the ring
has `L + 1` entries. Its cursors are derived on the host from token counts and never read back. What
FlashInfer has no call for, a row that begins or completes a block or ends its prefill, two small
kernels of `ssmcore_kernels.flashinfer.settle` do, launched only where such a row may be.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
from pydantic import Field as Option

from ssmcore.hookspecs import hookimpl
from ssmcore.replay import refuse_drafts, steps_since_anchor
from ssmcore.step import Rows
from ssmcore.strategies import (
    CacheMode,
    Conflict,
    CreateContext,
    DecodeAlgorithmRecord,
    DecodeInputs,
    Field,
    IntArray,
    MixerShape,
    Selection,
    SlotTensor,
    StrategyOptions,
)

if TYPE_CHECKING:
    import torch
    from ssmcore_kernels.flashinfer.checkpointing import Scratch

    from ssmcore.plan import DecodePlan

VERSION = "0.7.4"
"""Of flashinfer-python: the one release whose rules of rings and flushes these cursors follow."""


class FlashInferOptions(StrategyOptions):
    """Options of `replay-flashinfer`."""

    buffer_len: int = Option(default=16, ge=1, le=64, strict=True)
    """Steps from one write of the whole state to the next; FlashInfer runs at most 16."""


@dataclass(slots=True)
class _Buffers:
    """What `update` works in, made at the first step: nothing is allocated later.

    scratch: FlashInfer's; cursors: (2, slots), int32, ring_start and pending of every slot;
    index: (most rows,), int64, slots of the step's rows.
    """

    scratch: Scratch
    cursors: torch.Tensor
    index: torch.Tensor


@dataclass(frozen=True, slots=True)
class _Pass:
    """One run of a plan through all layers; `first_layer` is the address of its first state."""

    plan: DecodePlan
    first_layer: int
    carries: bool
    settles: bool


class ReplayFlashInfer:
    """FlashInfer's kernel as a strategy; one object serves the layers of one model."""

    fields: tuple[Field, ...] = (
        Field("ring_start"),
        Field("prev_num_accepted_tokens"),
        Field("fold_count"),
    )
    needs_decode_base = True
    keeps_pending_inputs = True
    max_draft_tokens: int | None = 0
    exact = False
    error_bound: float | None = 2e-2
    start_up_notes: tuple[str, ...] = (
        "replay-flashinfer: FlashInfer compiles its kernel with nvcc when a model's sizes are first"
        " used, which takes minutes; it keeps it in ~/.cache/flashinfer",
    )

    def __init__(self, options: FlashInferOptions, context: CreateContext) -> None:
        self.buffer_len = options.buffer_len
        self._most_rows = context.limits.max_num_seqs
        self._has_blocks = True
        self._buffers: _Buffers | None = None
        self._pass: _Pass | None = None

    def check(self, selection: Selection) -> Conflict | None:
        """Refuses drafts, and to run what FlashInfer has no kernel for."""
        self._has_blocks = selection.cache.block_size is not None
        if (conflict := refuse_drafts(selection)) is not None or not selection.running:
            return conflict
        for other, fits, wanted in self._limits(selection.mixer):
            if not fits:
                return Conflict(
                    setting=f"decode.name = {selection.names['decode']!r}",
                    other=other,
                    reason=f"FlashInfer's kernel takes {wanted} only",
                    instead=f"{wanted}, or decode.name = 'replay-triton'",
                )
        return None

    def _limits(self, mixer: MixerShape | None) -> Iterator[tuple[str, bool, str]]:
        """Each setting, whether FlashInfer's kernel takes it, and what it takes."""
        from ssmcore_kernels.flashinfer.checkpointing import DSTATES, HEADDIM, MAX_BUFFER_LEN

        length = self.buffer_len
        most = f"decode.buffer_len of at most {MAX_BUFFER_LEN}"
        yield f"decode.buffer_len = {length}", length <= MAX_BUFFER_LEN, most
        if mixer is None:
            return
        dtype = mixer.activation_dtype
        yield f"model.dtype = {dtype!r}", dtype == "bfloat16", "model.dtype = 'bfloat16'"
        dtype, states = mixer.state_dtype, ("float32", "bfloat16")
        wanted = " or ".join(f"cache.state_dtype = {name!r}" for name in states)
        yield f"cache.state_dtype = {dtype!r}", dtype in states, wanted
        size = mixer.headdim
        yield f"the model's headdim of {size}", size == HEADDIM, f"a headdim of {HEADDIM}"
        size, wanted = mixer.dstate, f"a dstate of {', '.join(map(str, DSTATES))}"
        yield f"the model's dstate of {size}", size in DSTATES, wanted

    def plan_fields(
        self, rows: Rows, cache: CacheMode, out: Mapping[str, npt.NDArray[Any]]
    ) -> IntArray | None:
        """Fill where the ring starts, how much of it is pending, and what to fold after the step.

        A row folds all that is pending, its new token included, when the step completes a block or
        the row is a leftover; an old ring that was full is folded by FlashInfer itself.
        """
        length = self.buffer_len
        steps = steps_since_anchor(rows, cache)
        before = np.maximum(steps, 1) - 1
        pending: IntArray = np.where(steps <= 0, 0, before % length + 1)
        pending[rows.num_real :] = 0
        whole_after = steps < 0
        if (boundary := cache.last_boundary(rows.seq_lens)) is not None:
            whole_after |= boundary == rows.seq_lens
        fold_count = np.where(pending == length, 1, pending + 1) * whole_after
        fold_count[rows.num_real :] = 0
        out["prev_num_accepted_tokens"][:] = pending
        out["ring_start"][:] = before // length * length % (length + 1)
        out["fold_count"][:] = fold_count
        return pending

    def slot_tensors(self, mixer: MixerShape) -> tuple[SlotTensor, ...]:
        """The ring of `L + 1` entries, heads before entries as FlashInfer has them."""
        entries = self.buffer_len + 1
        return (
            SlotTensor("ring_x", (mixer.heads, entries, mixer.headdim), mixer.activation_dtype),
            SlotTensor("ring_dt", (mixer.heads, entries), "float32"),
            SlotTensor("ring_B", (mixer.groups, entries, mixer.dstate), mixer.activation_dtype),
        )

    def update(
        self, inputs: DecodeInputs, slots: Mapping[str, torch.Tensor], plan: DecodePlan
    ) -> torch.Tensor:
        """One token a row."""
        import torch
        from ssmcore_kernels.flashinfer import checkpointing, settle

        state, x = slots["state"], inputs.x
        buffers, running = self._begin(inputs, state, plan)
        rings = {name: slots[name] for name in ("ring_x", "ring_dt", "ring_B")}
        pending = plan.tensor("prev_num_accepted_tokens")
        if running.carries:
            settle.carry_states(
                state=state,
                state_read_slots=plan.state_read_slots,
                write_slots=plan.write_slots,
                pending=pending,
            )
        out = checkpointing.checkpointing_state_update(
            x,
            inputs.dt,
            inputs.A,
            inputs.B,
            inputs.C,
            D=inputs.D,
            dt_bias=inputs.dt_bias,
            dt_limit=inputs.dt_limit,
            state=state,
            **rings,
            ring_start=buffers.cursors[0],
            pending=buffers.cursors[1],
            slots=plan.write_slots,
            scratch=buffers.scratch,
            out=torch.empty_like(x, memory_format=torch.contiguous_format),
        )
        if running.settles:
            settle.settle_rows(
                inputs.A,
                state=state,
                **rings,
                write_slots=plan.write_slots,
                ring_start=plan.tensor("ring_start"),
                pending=pending,
                fold_count=plan.tensor("fold_count"),
                out=out,
            )
        return out

    def _begin(
        self, inputs: DecodeInputs, state: torch.Tensor, plan: DecodePlan
    ) -> tuple[_Buffers, _Pass]:
        """What the layers of one pass share; its first layer puts the rows' cursors in place.

        A pass begins with another plan, or with the layer that the last pass began with.
        """
        import torch

        buffers, running, layer = self._buffers, self._pass, state.data_ptr()
        if buffers is not None and running is not None:
            if running.plan is plan and running.first_layer != layer:
                return buffers, running
            every = state.is_cuda and torch.cuda.is_current_stream_capturing()
        else:
            every = True  # compiled before any capture
        if buffers is None or buffers.cursors.shape[1] != len(state):
            buffers = self._buffers = self._allocate(inputs, len(state))
        rows, host = plan.num_rows, plan.host
        index = buffers.index[:rows].copy_(plan.write_slots)
        buffers.cursors[0].index_copy_(0, index, plan.tensor("ring_start"))
        buffers.cursors[1].index_copy_(0, index, plan.tensor("prev_num_accepted_tokens"))
        write = host["write_slots"]
        begin = (host["state_read_slots"] != write) & (host["prev_num_accepted_tokens"] == 0)
        self._pass = running = _Pass(
            plan,
            layer,
            carries=self._has_blocks and (every or bool(begin.any())),
            settles=every or bool(host["fold_count"].any()) or not bool(write.all()),
        )
        return buffers, running

    def _allocate(self, inputs: DecodeInputs, num_slots: int) -> _Buffers:
        import torch
        from ssmcore_kernels.flashinfer.checkpointing import make_scratch

        device = inputs.x.device
        heads = inputs.x.shape[1]
        return _Buffers(
            make_scratch(self._most_rows, heads, self.buffer_len, inputs.x.dtype, device),
            torch.zeros(2, num_slots, dtype=torch.int32, device=device),
            torch.zeros(self._most_rows, dtype=torch.int64, device=device),
        )


def unavailable(device: str) -> str | None:
    """Why it cannot run on `device`, or None."""
    install = 'pip install "ssmcore[flashinfer]"'
    for package in ("flashinfer", "triton"):
        if importlib.util.find_spec(package) is None:
            return f"{package} is not installed: {install}"
    try:
        version = importlib.metadata.version("flashinfer-python")
    except importlib.metadata.PackageNotFoundError:
        version = "of unknown version"
    if version != VERSION:
        return f"flashinfer-python is {version}; {VERSION} is what it is written for: {install}"
    if device != "cuda":
        return "it needs an NVIDIA GPU"
    import torch

    if not torch.cuda.is_available():
        return "it needs an NVIDIA GPU, and torch finds none"
    major, minor = torch.cuda.get_device_capability()
    if major < 8:
        return f"it needs a GPU of compute capability 8.0 or later; this one has {major}.{minor}"
    return None


@hookimpl
def ssmcore_decode_algorithms() -> Iterator[DecodeAlgorithmRecord]:
    """Offer `replay-flashinfer`."""
    yield DecodeAlgorithmRecord(
        name="replay-flashinfer",
        summary="ReplaySSM through FlashInfer's checkpointing_ssu.",
        options=FlashInferOptions,
        create=ReplayFlashInfer,
        unavailable=unavailable,
        preference=-5,
    )
