"""Small device functions that several kernels share."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def softplus(value):
    """log(1 + exp(value)) in float32, without overflow and exact to rounding for small exp."""
    small = tl.exp(tl.minimum(value, 20.0))
    series = small * (1.0 - small * (0.5 - small * (1.0 / 3.0)))
    soft = tl.where(small < 1e-3, series, tl.log(1.0 + small))
    return tl.where(value > 20.0, value, soft)


@triton.jit
def time_step(dt, bias, low, high, HAS_LIMIT: tl.constexpr):
    """dt after bias, softplus and `time_step_limit`, in float32."""
    dt = softplus(dt.to(tl.float32) + bias)
    if HAS_LIMIT:
        dt = tl.minimum(tl.maximum(dt, low), high)
    return dt
