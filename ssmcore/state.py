"""The state pool: what mixer and decode algorithm keep per slot, a tensor per layer and kind.

Slots are the first dimension; slot 0 is the null slot, never allocated, never read, never written.
Which slot belongs to whom is the block pool's business (`ssmcore.engine.blocks`), not this
module's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod

import torch

from ssmcore.errors import CapacityError
from ssmcore.strategies import DecodeAlgorithm, MixerShape, SlotTensor

NULL_SLOT = 0


def slot_tensors(mixer: MixerShape, decode: DecodeAlgorithm) -> tuple[SlotTensor, ...]:
    """All that a slot keeps in one layer: conv state, SSM state, and what `decode` declares.

    `conv`: (d_conv - 1, conv_dim), oldest input first; `state`: (heads, headdim, dstate).
    """
    return (
        SlotTensor("conv", (mixer.d_conv - 1, mixer.conv_dim), mixer.conv_dtype),
        SlotTensor("state", (mixer.heads, mixer.headdim, mixer.dstate), mixer.state_dtype),
        *decode.slot_tensors(mixer),
    )


def bytes_per_slot(tensors: Sequence[SlotTensor], num_layers: int) -> int:
    """Bytes that one slot takes over all layers."""
    return num_layers * sum(prod(tensor.shape) * _dtype(tensor).itemsize for tensor in tensors)


class StatePool:
    """Zeroed slot tensors of every layer.

    Args:
        tensors: what a slot keeps per layer (`slot_tensors`).
        num_layers: mixer layers.
        num_slots: slots in all, the null slot included; at least 2.
        device: where the tensors live.

    Raises:
        CapacityError: the device has not that much memory; the message says how many slots fit.
    """

    def __init__(
        self,
        tensors: Sequence[SlotTensor],
        num_layers: int,
        num_slots: int,
        device: torch.device | str,
    ) -> None:
        if num_slots < 2:
            raise CapacityError(f"a pool of {num_slots} slots has none besides the null slot")
        self.tensors = tuple(tensors)
        self.num_layers = num_layers
        self.num_slots = num_slots
        self.device = torch.device(device)
        self.bytes_per_slot = bytes_per_slot(tensors, num_layers)
        try:
            self._layers = [
                {
                    tensor.name: torch.zeros(
                        (num_slots, *tensor.shape), dtype=_dtype(tensor), device=self.device
                    )
                    for tensor in self.tensors
                }
                for _ in range(num_layers)
            ]
        except (torch.OutOfMemoryError, RuntimeError) as error:
            raise CapacityError(
                f"a state pool of {num_slots} slots takes {self.nbytes} bytes, more than"
                f" {self.device} could give; lower cache.memory or engine.max_num_seqs"
            ) from error

    @property
    def nbytes(self) -> int:
        """Bytes of the whole pool."""
        return self.num_slots * self.bytes_per_slot

    def layer(self, index: int) -> Mapping[str, torch.Tensor]:
        """Name to `(slots, ...)` tensor of one layer."""
        return self._layers[index]

    def poison(self, slots: Sequence[int]) -> None:
        """Fill slots with NaN: a test mode for freed slots, which nobody may read again."""
        index = torch.tensor(list(slots), dtype=torch.int64, device=self.device)
        for layer in self._layers:
            for tensor in layer.values():
                if tensor.is_floating_point():
                    tensor[index] = float("nan")


def _dtype(tensor: SlotTensor) -> torch.dtype:
    dtype = getattr(torch, tensor.dtype, None)
    if not isinstance(dtype, torch.dtype):
        raise CapacityError(f"slot tensor {tensor.name!r} has an unknown dtype {tensor.dtype!r}")
    return dtype
