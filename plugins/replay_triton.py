"""Decode algorithm `replay-triton`: ReplaySSM in one fused Triton kernel, on NVIDIA GPUs."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from ssmcore.hookspecs import hookimpl
from ssmcore.replay import ReplayOptions, RingReplay
from ssmcore.strategies import DecodeAlgorithmRecord, DecodeInputs

if TYPE_CHECKING:
    import torch

    from ssmcore.plan import DecodePlan


class ReplayTriton(RingReplay):
    """The fused kernel as a strategy."""

    def update(
        self, inputs: DecodeInputs, slots: Mapping[str, torch.Tensor], plan: DecodePlan
    ) -> torch.Tensor:
        """One token a row."""
        from ssmcore_kernels.triton.replay import replay_state_update

        return replay_state_update(
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


def unavailable(device: str) -> str | None:
    """Why the kernel cannot run on `device`, or None."""
    if importlib.util.find_spec("triton") is None:
        return 'triton is not installed: pip install "ssmcore[triton]"'
    if device != "cuda" and os.environ.get("TRITON_INTERPRET") != "1":
        return "it needs an NVIDIA GPU (TRITON_INTERPRET=1 runs it on a CPU, for tests only)"
    return None


@hookimpl
def ssmcore_decode_algorithms() -> Iterator[DecodeAlgorithmRecord]:
    """Offer `replay-triton`."""
    yield DecodeAlgorithmRecord(
        name="replay-triton",
        summary="ReplaySSM in one fused Triton kernel: writes the state once in buffer_len steps.",
        options=ReplayOptions,
        create=ReplayTriton,
        unavailable=unavailable,
        preference=10,
    )
