"""Argument checks of kernels: a message names the argument, what it is and what it must be."""

from __future__ import annotations

import torch


def check_shape(name: str, tensor: torch.Tensor, shape: tuple[int, ...]) -> None:
    """Raise ValueError unless `tensor` has `shape`."""
    if tensor.shape != shape:
        raise ValueError(f"{name}: shape {tuple(tensor.shape)}, wanted {shape}")
