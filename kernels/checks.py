"""Argument checks of kernels: a message names the argument, what came and what must come.

A check looks at shapes, dtypes and devices, never at values, for which one would have to wait for a
GPU.
"""

from __future__ import annotations

import torch

Dtypes = tuple[torch.dtype, ...]

FLOATS: Dtypes = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
WIDE: Dtypes = (torch.float32, torch.float64)
INTS: Dtypes = (torch.int32, torch.int64)
BOOL: Dtypes = (torch.bool,)


def is_host(tensor: torch.Tensor) -> bool:
    """Whether a look at a value of `tensor` waits for no device."""
    return tensor.device.type == "cpu"


def check(
    name: str,
    tensor: torch.Tensor,
    form: str,
    shape: tuple[int, ...],
    dtypes: Dtypes,
    device: torch.device,
) -> None:
    """Raise ValueError unless `tensor` has the shape, one of the dtypes, and is on the device.

    Args:
        form: the shape in words, as the docstring has it: "(rows, heads)".
    """
    if tensor.shape != shape or tensor.dtype not in dtypes or tensor.device != device:
        names = " or ".join(_short(dtype) for dtype in dtypes)
        raise ValueError(
            f"{name}: {tuple(tensor.shape)}, {_short(tensor.dtype)}, on {tensor.device}; wanted"
            f" {form} = {shape}, {names}, on {device}"
        )


def check_dims(name: str, tensor: torch.Tensor, form: str, dims: int) -> None:
    """Raise ValueError unless `tensor` is floating point and has `dims` dimensions."""
    if tensor.dim() != dims or tensor.dtype not in FLOATS:
        names = " or ".join(_short(dtype) for dtype in FLOATS)
        raise ValueError(
            f"{name}: {tuple(tensor.shape)}, {_short(tensor.dtype)}; wanted {form}, {names}"
        )


def check_mixer(
    rows: str,
    x: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    D: torch.Tensor,
    dt_bias: torch.Tensor,
) -> tuple[int, int, int, int, int]:
    """Check what every form of the recurrence takes; `rows` says what the first dimension counts.

    Returns:
        rows, heads, headdim, groups, dstate.
    """
    check_dims("x", x, f"({rows}, heads, headdim)", 3)
    check_dims("B", B, f"({rows}, groups, dstate)", 3)
    count, heads, headdim = x.shape
    groups, dstate = B.shape[1:]
    device, same = x.device, (x.dtype,)
    check("dt", dt, f"({rows}, heads)", (count, heads), FLOATS, device)
    check("B", B, f"({rows}, groups, dstate)", (count, groups, dstate), same, device)
    check("C", C, f"({rows}, groups, dstate)", (count, groups, dstate), same, device)
    for name, tensor in (("A", A), ("D", D), ("dt_bias", dt_bias)):
        check(name, tensor, "(heads,)", (heads,), WIDE, device)
    if groups < 1 or heads % groups:
        raise ValueError(f"B: {groups} groups; wanted a divisor of the {heads} heads of x")
    return count, heads, headdim, groups, dstate


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
