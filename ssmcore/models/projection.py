"""Matrix products with weights, from plain tensors or from weights packed for this CPU.

A plain product packs its weight anew each time, which for a few rows costs more than the product
itself; packed once, a decode step of 2 to 16 rows takes about half. Packed weights are torch's own
oneDNN tensors: same shape, same values (`to_dense`), float32 on a CPU only.
"""

from __future__ import annotations

from functools import cache

import torch
from torch.nn.functional import linear

_ROWS_HINT = 8
_SMALLEST = 2**21


def project(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """x @ weight.T + bias; x: (tokens, n), weight: (m, n), plain or packed, bias: (m,) or None."""
    if weight.is_mkldnn:
        y: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
        return y
    return linear(x, weight, bias)


def packed(weight: torch.Tensor) -> torch.Tensor:
    """The weight packed, or itself where that is not possible or does not pay."""
    fits = weight.device.type == "cpu" and weight.dtype == torch.float32
    if not fits or weight.nbytes < _SMALLEST or not _works():
        return weight
    return _pack(weight)


def _pack(weight: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        result: torch.Tensor = torch.ops.mkldnn._reorder_linear_weight(weight, _ROWS_HINT)
    return result


@cache
def _works() -> bool:
    """Whether this build of torch has the two functions and they do what is expected of them."""
    try:
        weight = torch.arange(48, dtype=torch.float32).view(6, 8)
        x, bias = weight[:3].flip(0), weight[0, :6]
        got = project(x, _pack(weight), bias)
    except (AttributeError, NotImplementedError, RuntimeError, TypeError):
        return False
    return torch.equal(got, linear(x, weight, bias))
