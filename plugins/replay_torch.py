"""Decode algorithm `replay-torch`: ReplaySSM in plain torch, on any device.

The output is read from an old whole state plus a ring of recent inputs; the state is written once
in `buffer_len` steps. This is the reference that the faster kernels are held to.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from ssmcore.hookspecs import hookimpl
from ssmcore.replay import ReplayOptions, RingReplay
from ssmcore.strategies import DecodeAlgorithmRecord, DecodeInputs

if TYPE_CHECKING:
    import torch

    from ssmcore.plan import DecodePlan


class ReplayTorch(RingReplay):
    """The torch reference of the family as a strategy."""

    def update(
        self, inputs: DecodeInputs, slots: Mapping[str, torch.Tensor], plan: DecodePlan
    ) -> torch.Tensor:
        """One token a row."""
        from ssmcore_kernels.reference.replay import replay_state_update

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


@hookimpl
def ssmcore_decode_algorithms() -> Iterator[DecodeAlgorithmRecord]:
    """Offer `replay-torch`."""
    yield DecodeAlgorithmRecord(
        name="replay-torch",
        summary="ReplaySSM in plain torch: writes the state once in buffer_len steps.",
        options=ReplayOptions,
        create=ReplayTorch,
        preference=-10,
    )
