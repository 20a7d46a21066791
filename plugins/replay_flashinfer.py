"""Decode algorithm `replay-flashinfer`: ReplaySSM through FlashInfer's `checkpointing_ssu`.

A flush there folds the old entries only, so the whole state lags at least one token and the ring
has `L + 1` entries. Its cursors are derived on the host from token counts and never read back.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
from pydantic import Field as Option

from ssmcore.errors import UnavailableError
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

    from ssmcore.plan import DecodePlan


class FlashInferOptions(StrategyOptions):
    """Options of `replay-flashinfer`."""

    buffer_len: int = Option(default=16, ge=1, le=64, strict=True)
    """Steps from one write of the whole state to the next; FlashInfer runs at most 16."""


class ReplayFlashInfer:
    """FlashInfer's kernel as a strategy."""

    fields: tuple[Field, ...] = (Field("ring_start"), Field("prev_num_accepted_tokens"))
    needs_decode_base = True
    keeps_pending_inputs = True
    max_draft_tokens: int | None = 0
    exact = False
    error_bound: float | None = 2e-2

    def __init__(self, options: FlashInferOptions, context: CreateContext) -> None:
        self.buffer_len = options.buffer_len

    def check(self, selection: Selection) -> Conflict | None:
        """Refuses drafts, and to run with longer rings or with blocks."""
        if (conflict := refuse_drafts(selection)) is not None or not selection.running:
            return conflict
        name = f"decode.name = {selection.names['decode']!r}"
        if selection.cache.block_size is not None:
            return Conflict(
                setting=name,
                other=f"cache.name = {selection.names['cache']!r}",
                reason="FlashInfer's kernel takes one state slot a row, so it cannot cross blocks",
                instead="cache.name = 'none', or decode.name = 'replay-triton'",
            )
        if self.buffer_len > 16:
            return Conflict(
                setting=name,
                other=f"decode.buffer_len = {self.buffer_len}",
                reason="FlashInfer's ring takes at most 16 steps",
                instead="decode.buffer_len of at most 16, or decode.name = 'replay-triton'",
            )
        return None

    def plan_fields(
        self, rows: Rows, cache: CacheMode, out: Mapping[str, npt.NDArray[Any]]
    ) -> IntArray | None:
        """Fill where the ring starts and how many entries it holds; the state lags by those."""
        length = self.buffer_len
        steps = steps_since_anchor(rows, cache)
        before = np.maximum(steps, 1) - 1
        pending: IntArray = np.where(steps <= 0, 0, before % length + 1)
        pending[rows.num_real :] = 0
        out["prev_num_accepted_tokens"][:] = pending
        out["ring_start"][:] = before // length * length % (length + 1)
        return pending

    def slot_tensors(self, mixer: MixerShape) -> tuple[SlotTensor, ...]:
        """The ring of `L + 1` entries."""
        entries = self.buffer_len + 1
        return (
            SlotTensor("ring_x", (entries, mixer.heads, mixer.headdim), mixer.activation_dtype),
            SlotTensor("ring_dt", (mixer.heads, entries), "float32"),
            SlotTensor("ring_B", (entries, mixer.groups, mixer.dstate), mixer.activation_dtype),
        )

    def update(
        self, inputs: DecodeInputs, slots: Mapping[str, torch.Tensor], plan: DecodePlan
    ) -> torch.Tensor:
        """Not run yet; plans exist all the same."""
        raise UnavailableError("replay-flashinfer plans, but does not run yet")


def unavailable(device: str) -> str | None:
    """Why it cannot run on `device`, or None."""
    return "it plans, but does not run yet; decode.name = 'replay-triton' does"


@hookimpl
def ssmcore_decode_algorithms() -> Iterator[DecodeAlgorithmRecord]:
    """Offer `replay-flashinfer`."""
    yield DecodeAlgorithmRecord(
        name="replay-flashinfer",
        summary="ReplaySSM through FlashInfer's checkpointing_ssu.",
        options=FlashInferOptions,
        create=ReplayFlashInfer,
        unavailable=unavailable,
    )
