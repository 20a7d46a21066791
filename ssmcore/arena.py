"""One block of memory for all fields of a step: pinned host halves, one device block, one upload.

A `Layout` packs the fields of a step tightly, so the bytes that one asynchronous copy must move are
the first `nbytes` of the block; its offsets depend on the step's sizes only, so at one padded row
count every field keeps its device address and a captured graph may read it. The host side is
doubled: the next step is planned while the last one's copy may still be in flight, and an event
guards each half.
"""

from __future__ import annotations

from collections.abc import Iterable
from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    import torch

ALIGNMENT = 16
"""Bytes; what vector loads of a kernel want."""


Entry = tuple[int, np.dtype[Any], tuple[int, ...]]
"""One field of a layout: its offset in bytes, dtype and shape."""


class Layout:
    """Offsets of named arrays packed one behind the other, each aligned.

    Attributes:
        entries: part and name to `Entry`.
        nbytes: bytes in all.
    """

    __slots__ = ("entries", "nbytes")

    def __init__(
        self,
        fields: Iterable[tuple[tuple[str, str], np.dtype[Any], tuple[int, ...]]],
        start: int = 0,
    ):
        self.entries: dict[tuple[str, str], Entry] = {}
        offset = start
        for name, dtype, shape in fields:
            self.entries[name] = (offset, dtype, shape)
            offset += -(-dtype.itemsize * prod(shape) // ALIGNMENT) * ALIGNMENT
        self.nbytes = offset


class Arena:
    """Memory of one cache group's plans.

    Args:
        nbytes: capacity of the block.
        device: where the device block lives; None keeps host memory only (planning alone).
    """

    def __init__(self, nbytes: int, device: torch.device | None = None) -> None:
        self.nbytes = -(-max(nbytes, 1) // ALIGNMENT) * ALIGNMENT
        self.device = device
        self._typed: list[dict[np.dtype[Any], npt.NDArray[Any]]] = [{}, {}]
        self._typed_block: dict[np.dtype[Any], torch.Tensor] = {}
        self._mirror: npt.NDArray[np.uint8] | None = None
        self._half = 0
        self._pinned: list[torch.Tensor] = []
        self._events: list[torch.cuda.Event] = []
        self.block: torch.Tensor | None = None
        if device is None:
            self._host = [_aligned(self.nbytes), _aligned(self.nbytes)]
            return
        import torch

        self.block = torch.zeros(self.nbytes, dtype=torch.uint8, device=device)
        if device.type == "cuda":
            self._pinned = [
                torch.empty(self.nbytes, dtype=torch.uint8, pin_memory=True) for _ in range(2)
            ]
            self._events = [torch.cuda.Event() for _ in range(2)]  # type: ignore[no-untyped-call]
            self._host = [half.numpy() for half in self._pinned]
        else:
            self._host = [_aligned(self.nbytes), _aligned(self.nbytes)]
            self._mirror = self.block.numpy()

    def next_half(self) -> int:
        """Turn to the other host half; waits until its last upload has left it."""
        self._half ^= 1
        if self._events:
            self._events[self._half].synchronize()
        return self._half

    def host(self, half: int, entry: Entry) -> npt.NDArray[Any]:
        """Writable host view of an entry in one half."""
        offset, dtype, shape = entry
        whole = self._typed[half].get(dtype)  # slicing it costs a third of a new array
        if whole is None:
            whole = self._typed[half][dtype] = self._host[half].view(dtype)
        start = offset // dtype.itemsize
        if len(shape) == 1:
            return whole[start : start + shape[0]]
        return whole[start : start + prod(shape)].reshape(shape)

    def on_device(self, entry: Entry) -> torch.Tensor:
        """Device view of an entry; its address is the same whenever the layout is.

        Raises:
            RuntimeError: the arena was made without a device.
        """
        if self.block is None:
            raise RuntimeError("this pipeline plans without a device; give it one to run its plans")
        offset, dtype, shape = entry
        whole = self._typed_block.get(dtype)
        if whole is None:
            import torch

            of: torch.dtype = getattr(torch, dtype.name)
            whole = self._typed_block[dtype] = self.block.view(of)
        start = offset // dtype.itemsize
        if len(shape) == 1:
            return whole[start : start + shape[0]]
        return whole[start : start + prod(shape)].view(shape)

    def upload(self, nbytes: int) -> None:
        """Copy the first `nbytes` of the current half to the device: one asynchronous copy."""
        if self.block is None:
            return
        if self._pinned:
            self.block[:nbytes].copy_(self._pinned[self._half][:nbytes], non_blocking=True)
            self._events[self._half].record()
        elif self._mirror is not None:
            self._mirror[:nbytes] = self._host[self._half][:nbytes]

    def copy_from(self, other: Arena, nbytes: int) -> None:
        """Take the first `nbytes` of another arena's current host half."""
        self._host[self._half][:nbytes] = other._host[other._half][:nbytes]


def _aligned(nbytes: int) -> npt.NDArray[np.uint8]:
    raw = np.empty(nbytes + 64, dtype=np.uint8)
    start = -raw.ctypes.data % 64
    return raw[start : start + nbytes]
