"""dt as the recurrence uses it: bias, softplus without overflow, `time_step_limit`."""

from __future__ import annotations

import torch

LINEAR_FROM = 40.0  # softplus(v) = v to the last bit of float64 from here on, and exp(v) is finite


def time_step(
    dt: torch.Tensor, dt_bias: torch.Tensor, dt_limit: tuple[float, float]
) -> torch.Tensor:
    """softplus(dt + dt_bias) clamped to `dt_limit`, in float32 (float64 for float64 dt)."""
    wide = torch.promote_types(dt.dtype, torch.float32)
    dt = torch.nn.functional.softplus(dt.to(wide) + dt_bias.to(wide), threshold=LINEAR_FROM)
    low, high = dt_limit
    return dt if low <= 0.0 and high == float("inf") else dt.clamp(low, high)
