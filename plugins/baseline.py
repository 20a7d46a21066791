"""Decode algorithm `baseline`: every step reads the state and writes it.

The recurrence of Mamba-2 as published (Dao and Gu 2024, arXiv 2405.21060).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import numpy.typing as npt

from ssmcore.hookspecs import hookimpl
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


class Baseline:
    """The recurrent update, state read and written at every token."""

    fields: tuple[Field, ...] = ()
    needs_decode_base = False
    keeps_pending_inputs = False
    max_draft_tokens: int | None = None
    exact = True
    error_bound: float | None = None

    def __init__(self, options: StrategyOptions, context: CreateContext) -> None:
        pass

    def check(self, selection: Selection) -> Conflict | None:
        """Lives with every strategy."""
        return None

    def plan_fields(
        self, rows: Rows, cache: CacheMode, out: Mapping[str, npt.NDArray[Any]]
    ) -> IntArray | None:
        """Declares no fields; the state never lags."""
        return None

    def slot_tensors(self, mixer: MixerShape) -> tuple[SlotTensor, ...]:
        """Keeps nothing but the state."""
        return ()

    def update(
        self, inputs: DecodeInputs, slots: Mapping[str, torch.Tensor], plan: DecodePlan
    ) -> torch.Tensor:
        """One token a row, or `1 + S` where accepted-token counts are given."""
        from ssmcore_kernels import for_device

        return for_device(inputs.x.device).selective_state_update(
            inputs.x,
            inputs.dt,
            inputs.A,
            inputs.B,
            inputs.C,
            D=inputs.D,
            dt_bias=inputs.dt_bias,
            dt_limit=inputs.dt_limit,
            state=slots["state"],
            read_slots=plan.state_read_slots,
            write_slots=plan.write_slots,
            query_start_loc=plan.query_start_loc,
        )


@hookimpl
def ssmcore_decode_algorithms() -> Iterator[DecodeAlgorithmRecord]:
    """Offer `baseline`."""
    yield DecodeAlgorithmRecord(
        name="baseline",
        summary="Reads and writes the whole state at every step.",
        options=StrategyOptions,
        create=Baseline,
    )
