"""One decode step through FlashInfer's `checkpointing_ssu`; nothing of its code is here.

FlashInfer decides on a flush itself: a row that holds `L` pending entries in its ring of `L + 1`
folds those into the state before it appends the new one, so a state lags at least one token. Where
a ring starts and how much of it is pending is the caller's to know.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from ssmcore_kernels.checks import INTS, check, check_mixer

MAX_BUFFER_LEN = 16
HEADDIM = 64
DSTATES = (64, 128, 256)
_ACTIVATIONS = (torch.bfloat16,)
_STATES = (torch.float32, torch.bfloat16)


@dataclass(frozen=True, slots=True)
class Scratch:
    """Work space of up to as many rows as it was made for, shared by all layers of a stream.

    products_new, decay, products_old: FlashInfer's own, see `make_scratch`;
    dt: (rows, heads), float32, after bias, softplus and limit; zero: (), float32.
    """

    products_new: torch.Tensor
    decay: torch.Tensor
    products_old: torch.Tensor
    dt: torch.Tensor
    zero: torch.Tensor

    def of(self, rows: int) -> dict[str, torch.Tensor]:
        """FlashInfer's part for a step of `rows` rows, by its names."""
        return {
            "cb_scaled": self.products_new[:rows],
            "cumAdt_vec": self.decay[:rows],
            "cb_old": self.products_old[:rows],
        }


def make_scratch(
    rows: int, heads: int, buffer_len: int, dtype: torch.dtype, device: torch.device
) -> Scratch:
    """Scratch for steps of up to `rows` rows, one token each, with rings of `buffer_len + 1`."""
    from flashinfer.mamba import allocate_checkpointing_ssu_scratch

    new, decay, old = allocate_checkpointing_ssu_scratch(rows, heads, 1, buffer_len, dtype, device)
    return Scratch(
        products_new=new,
        decay=decay,
        products_old=old,
        dt=torch.empty(rows, heads, dtype=torch.float32, device=device),
        zero=torch.zeros((), dtype=torch.float32, device=device),
    )


def checkpointing_state_update(
    x: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    *,
    D: torch.Tensor,
    dt_bias: torch.Tensor,
    dt_limit: tuple[float, float],
    state: torch.Tensor,
    ring_x: torch.Tensor,
    ring_dt: torch.Tensor,
    ring_B: torch.Tensor,
    ring_start: torch.Tensor,
    pending: torch.Tensor,
    slots: torch.Tensor,
    scratch: Scratch,
    out: torch.Tensor,
) -> torch.Tensor:
    """One token a row: output, one ring entry, and the folded state where the ring is full.

    Args:
        x: (rows, heads, headdim), bfloat16, a row contiguous; dt: (rows, heads), raw.
        A, D, dt_bias: (heads,), float32; B, C: (rows, groups, dstate), bfloat16, a row contiguous.
        dt_limit: bounds of dt after softplus.
        state: (slots, heads, headdim, dstate), float32 or bfloat16, a slot contiguous.
        ring_x: (slots, heads, L + 1, headdim), bfloat16; ring_dt: (slots, heads, L + 1), float32,
            after bias, softplus and limit; ring_B: (slots, groups, L + 1, dstate), bfloat16.
        ring_start, pending: (slots,), int32, of every slot: its ring's oldest entry, and how many
            entries from there are not in its state.
        slots: (rows,), int32; 0 for a padding row, of which neither slot nor output is touched.
        scratch: of `make_scratch`.
        out: where y goes, like x and contiguous.

    Returns:
        out.

    Raises:
        ValueError: an argument of another shape, dtype, device or layout.
    """
    check("x", x, "(rows, heads, headdim)", tuple(x.shape), _ACTIVATIONS, x.device)
    rows, heads, headdim, groups, dstate = check_mixer("rows", x, dt, A, B, C, D, dt_bias)
    count, entries, device = state.shape[0], ring_x.shape[2], x.device
    for name, tensor in (("A", A), ("D", D), ("dt_bias", dt_bias)):
        check(name, tensor, "(heads,)", (heads,), (torch.float32,), device)
    shape: tuple[int, ...] = (count, heads, headdim, dstate)
    check("state", state, "(slots, heads, headdim, dstate)", shape, _STATES, device)
    shape = (count, heads, entries, headdim)
    check("ring_x", ring_x, "(slots, heads, L + 1, headdim)", shape, _ACTIVATIONS, device)
    shape = (count, heads, entries)
    check("ring_dt", ring_dt, "(slots, heads, L + 1)", shape, (torch.float32,), device)
    shape = (count, groups, entries, dstate)
    check("ring_B", ring_B, "(slots, groups, L + 1, dstate)", shape, _ACTIVATIONS, device)
    check("ring_start", ring_start, "(slots,)", (count,), INTS[:1], device)
    check("pending", pending, "(slots,)", (count,), INTS[:1], device)
    check("slots", slots, "(rows,)", (rows,), INTS[:1], device)
    check("out", out, "(rows, heads, headdim)", tuple(x.shape), (x.dtype,), device)
    if headdim != HEADDIM or dstate not in DSTATES or not 2 <= entries <= MAX_BUFFER_LEN + 1:
        raise ValueError(
            f"headdim {headdim}, dstate {dstate}, L {entries - 1}; wanted headdim {HEADDIM}, dstate"
            f" {DSTATES}, L from 1 to {MAX_BUFFER_LEN}"
        )
    for name, tensor in (("x", x), ("B", B), ("C", C), ("out", out), ("state", state)):
        _check_inner(name, tensor)

    if dt_limit[0] > 0.0 or dt_limit[1] != math.inf:
        dt, bias, softplus = _limited(dt, dt_bias, dt_limit, scratch), None, False
    else:
        bias, softplus = dt_bias[:, None].expand(heads, headdim), True
    _call(
        state,
        ring_x,
        ring_B,
        ring_dt,
        ring_start,
        pending,
        x[:, None],
        dt[:, None, :, None].expand(rows, 1, heads, headdim),
        A[:, None, None].expand(heads, headdim, dstate),
        B[:, None],
        C[:, None],
        out[:, None],
        D=D[:, None].expand(heads, headdim),
        dt_bias=bias,
        dt_softplus=softplus,
        state_batch_indices=slots,
        pad_slot_id=0,
        **scratch.of(rows),
    )
    return out


def _call(*args: torch.Tensor, **kwargs: Any) -> None:
    """FlashInfer's form in two kernels.

    It reads no more of a ring than is pending. The other form multiplies what is stale by zero,
    which a NaN left there survives.
    """
    from flashinfer.mamba import checkpointing_ssu

    checkpointing_ssu(*args, algorithm="two-kernel", **kwargs)


def _limited(
    dt: torch.Tensor, dt_bias: torch.Tensor, dt_limit: tuple[float, float], scratch: Scratch
) -> torch.Tensor:
    """dt as the recurrence uses it, in the scratch: FlashInfer knows no limit."""
    wide = torch.add(dt, dt_bias, out=scratch.dt[: len(dt)])
    torch.logaddexp(wide, scratch.zero, out=wide)
    return wide.clamp_(*dt_limit)


def _check_inner(name: str, tensor: torch.Tensor) -> None:
    """Refuse what FlashInfer's 16-byte loads cannot read: rows in pieces or off their places."""
    inner = tensor[0]
    offset = tensor.stride(0) * tensor.element_size()
    if not inner.is_contiguous() or offset % 16 or tensor.data_ptr() % 16:
        raise ValueError(
            f"{name}: strides {tensor.stride()} from address {tensor.data_ptr():#x}; wanted all but"
            " the first dimension contiguous, and rows that start at multiples of 16 bytes"
        )
