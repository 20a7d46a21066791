"""Decode algorithm `replay-triton`: ReplaySSM in one fused Triton kernel, on NVIDIA GPUs."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from ssmcore.hookspecs import hookimpl
from ssmcore.replay import ReplayOptions, RingReplay
from ssmcore.strategies import DecodeAlgorithmRecord

if TYPE_CHECKING:
    import torch


class ReplayTriton(RingReplay):
    """The fused kernel as a strategy."""

    def kernel(self) -> Callable[..., torch.Tensor]:
        """The family's step in Triton."""
        from ssmcore_kernels.triton.replay import replay_state_update

        return replay_state_update


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
