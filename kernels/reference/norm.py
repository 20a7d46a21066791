"""Root-mean-square norms: plain, fused with the residual, and gated per group."""

from __future__ import annotations

import torch
from ssmcore_kernels.checks import FLOATS, check


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x / rms(x) * weight; x: (tokens, d), weight: (d,). Comes back in the weight's dtype."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return normed.to(weight.dtype) * weight


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Norm of x + residual, and that sum as the new residual, in the residual's dtype."""
    residual = residual + x
    return rms_norm(residual, weight, eps), residual


def gated_rms_norm(
    x: torch.Tensor, z: torch.Tensor, weight: torch.Tensor, *, group_size: int, eps: float
) -> torch.Tensor:
    """Norm of x * silu(z) over each group of `group_size` channels.

    x, z: (tokens, d), activation dtype; weight: (d,). Comes back in the weight's dtype.
    """
    tokens, channels = x.shape
    check("z", z, "(tokens, d)", (tokens, channels), FLOATS, x.device)
    check("weight", weight, "(d,)", (channels,), FLOATS, x.device)
    if group_size < 1 or channels % group_size:
        raise ValueError(f"group_size: {group_size}; wanted a divisor of the {channels} channels")
    dtype = torch.promote_types(x.dtype, torch.float32)
    gated = x.to(dtype) * torch.nn.functional.silu(z.to(dtype))
    grouped = gated.view(tokens, channels // group_size, group_size)
    grouped = grouped * torch.rsqrt(grouped.square().mean(-1, keepdim=True) + eps)
    return grouped.view(tokens, channels).to(weight.dtype) * weight
