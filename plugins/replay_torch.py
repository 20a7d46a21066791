"""Decode algorithm `replay-torch`: ReplaySSM in plain torch, on any device.

The output is read from an old whole state plus a ring of recent inputs; the state is written once
in `buffer_len` steps. This is the reference that the faster kernels are held to.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from ssmcore.hookspecs import hookimpl
from ssmcore.replay import ReplayOptions, RingReplay
from ssmcore.strategies import DecodeAlgorithmRecord

if TYPE_CHECKING:
    import torch


class ReplayTorch(RingReplay):
    """The torch reference of the family as a strategy."""

    def kernel(self) -> Callable[..., torch.Tensor]:
        """The family's step in torch."""
        from ssmcore_kernels.reference.replay import replay_state_update

        return replay_state_update


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
