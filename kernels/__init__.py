"""Kernels: functions over tensors that know nothing of engines.

`reference` is plain torch for every device; `for_device` hands out what runs best on one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from ssmcore_kernels.reference.conv import causal_conv1d_prefill, causal_conv1d_update
from ssmcore_kernels.reference.norm import add_rms_norm, gated_rms_norm, rms_norm
from ssmcore_kernels.reference.ssd import ssd_chunk_scan, ssd_prefill
from ssmcore_kernels.reference.state_update import selective_state_update


@dataclass(frozen=True, slots=True)
class Kernels:
    """One device's functions; signatures are those of `ssmcore_kernels.reference`."""

    causal_conv1d_prefill: Callable[..., torch.Tensor]
    causal_conv1d_update: Callable[..., torch.Tensor]
    ssd_chunk_scan: Callable[..., tuple[torch.Tensor, torch.Tensor]]
    ssd_prefill: Callable[..., torch.Tensor]
    selective_state_update: Callable[..., torch.Tensor]
    rms_norm: Callable[..., torch.Tensor]
    add_rms_norm: Callable[..., tuple[torch.Tensor, torch.Tensor]]
    gated_rms_norm: Callable[..., torch.Tensor]


@cache
def _kernels(device_type: str) -> Kernels:
    return Kernels(
        causal_conv1d_prefill=causal_conv1d_prefill,
        causal_conv1d_update=causal_conv1d_update,
        ssd_chunk_scan=ssd_chunk_scan,
        ssd_prefill=ssd_prefill,
        selective_state_update=selective_state_update,
        rms_norm=rms_norm,
        add_rms_norm=add_rms_norm,
        gated_rms_norm=gated_rms_norm,
    )


def for_device(device: Any) -> Kernels:
    """The kernels for a torch device (or its name)."""
    return _kernels(torch.device(device).type)
