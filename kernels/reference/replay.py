"""One decode step of ReplaySSM in torch: output from an old whole state and a ring of inputs.

With later(j) the sum of dt after entry j, the current token being the last entry:
    y = exp(A total) (S0 C) + sum_j dt_j exp(A later(j)) (B_j . C) x_j + D x
    S = exp(A total) S0 + sum_j dt_j exp(A later(j)) x_j B_j^T       (written on a flush)
"""

from __future__ import annotations

import torch
from ssmcore_kernels.checks import BOOL, FLOATS, INTS, WIDE, check, check_mixer
from ssmcore_kernels.reference.time_step import time_step


def replay_state_update(
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
    state_read_slots: torch.Tensor,
    write_slots: torch.Tensor,
    write_pos: torch.Tensor,
    is_flush: torch.Tensor,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """One token a row; the ring of a row lives in its write slot.

    Args:
        x: (rows, heads, headdim), activation dtype; dt: (rows, heads), raw.
        A, D, dt_bias: (heads,), float32; B, C: (rows, groups, dstate), activation dtype.
        dt_limit: bounds of dt after softplus.
        state: (slots, heads, headdim, dstate), state dtype; updated in place on a flush.
        ring_x: (slots, L, heads, headdim), activation dtype; ring_dt: (slots, L, heads), float32,
            after bias, softplus and limit; ring_B: (slots, L, groups, dstate), activation dtype.
        state_read_slots, write_slots, write_pos: (rows,), int32; is_flush: (rows,), bool.
        out: where y goes, or None to allocate it.

    Returns:
        y: like x; zero for padding rows (write slot 0), which rewrite the null slot with its own
        content and change no other.
    """
    rows, heads, headdim, groups, dstate = check_mixer("rows", x, dt, A, B, C, D, dt_bias)
    slots, size, device, same = state.shape[0], ring_x.shape[1], x.device, (x.dtype,)
    shape: tuple[int, ...] = (slots, heads, headdim, dstate)
    check("state", state, "(slots, heads, headdim, dstate)", shape, FLOATS, device)
    shape = (slots, size, heads, headdim)
    check("ring_x", ring_x, "(slots, L, heads, headdim)", shape, same, device)
    check("ring_dt", ring_dt, "(slots, L, heads)", (slots, size, heads), WIDE, device)
    shape = (slots, size, groups, dstate)
    check("ring_B", ring_B, "(slots, L, groups, dstate)", shape, same, device)
    check("state_read_slots", state_read_slots, "(rows,)", (rows,), INTS, device)
    check("write_slots", write_slots, "(rows,)", (rows,), INTS, device)
    check("write_pos", write_pos, "(rows,)", (rows,), INTS, device)
    check("is_flush", is_flush, "(rows,)", (rows,), BOOL, device)
    if out is not None:
        check("out", out, "(rows, heads, headdim)", (rows, heads, headdim), same, device)
    per_group = heads // groups
    wide = torch.promote_types(x.dtype, torch.float32)
    write = write_slots.long()
    live = write > 0
    pending = torch.where(live, write_pos.long(), 0)
    rates = A.to(wide)

    new_dt = time_step(dt, dt_bias, dt_limit).to(wide)
    dts, xs, bs = _entries(
        ring_x, ring_dt, ring_B, write, pending, x.to(wide), new_dt, B.to(wide), wide
    )
    weight, decay = _weights(dts, rates)

    old = state[torch.where(live, state_read_slots.long(), 0)].to(wide)
    cs = C.to(wide).repeat_interleave(per_group, dim=1)
    products = (bs * C.to(wide)[:, None]).sum(dim=-1)
    products = products.repeat_interleave(per_group, dim=2)
    y = decay[..., None] * (old @ cs[..., None]).squeeze(-1)
    y = y + ((weight * products)[..., None] * xs).sum(dim=1) + D.to(wide)[:, None] * x.to(wide)
    y = torch.where(live[:, None, None], y, 0.0).to(x.dtype)

    kept = torch.where(live, write, 0)
    flush = is_flush & live
    if (
        x.device.type == "cpu"
    ):  # fold just the rows that flush; a GPU would have to wait to know them
        due = flush.nonzero().flatten()
        folded = _fold(old[due], weight[due], decay[due], xs[due], bs[due])
        state[kept[due]] = folded.to(state.dtype)
    else:
        folded = _fold(old, weight, decay, xs, bs).to(state.dtype)
        state[kept] = torch.where(flush[:, None, None, None], folded, state[kept])
    append = live & ~is_flush
    at = torch.where(append, pending, 0)
    for ring, entry in ((ring_x, x), (ring_dt, new_dt), (ring_B, B)):
        mask = append.view(-1, *[1] * (entry.dim() - 1))
        ring[kept, at] = torch.where(mask, entry.to(ring.dtype), ring[kept, at])
    return y if out is None else out.copy_(y)


def materialize_state(
    A: torch.Tensor,
    *,
    state: torch.Tensor,
    ring_x: torch.Tensor,
    ring_dt: torch.Tensor,
    ring_B: torch.Tensor,
    state_read_slots: torch.Tensor,
    ring_slots: torch.Tensor,
    pending: torch.Tensor,
) -> torch.Tensor:
    """The whole state of rows: what stands in their slots with `pending` ring entries folded in.

    Args:
        A: (heads,), float32.
        state_read_slots, ring_slots, pending: (rows,), int32.

    Returns:
        (rows, heads, headdim, dstate), float32 or wider; nothing is written.
    """
    wide = torch.promote_types(state.dtype, torch.float32)
    live = torch.arange(ring_x.shape[1], device=state.device) < pending[:, None]
    slots = ring_slots.long()
    dts = torch.where(live[..., None], ring_dt[slots].to(wide), 0.0)
    xs = torch.where(live[..., None, None], ring_x[slots].to(wide), 0.0)
    bs = torch.where(live[..., None, None], ring_B[slots].to(wide), 0.0)
    weight, decay = _weights(dts, A.to(wide))
    return _fold(state[state_read_slots.long()].to(wide), weight, decay, xs, bs)


def _entries(
    ring_x: torch.Tensor,
    ring_dt: torch.Tensor,
    ring_B: torch.Tensor,
    slots: torch.Tensor,
    pending: torch.Tensor,
    x: torch.Tensor,
    dt: torch.Tensor,
    B: torch.Tensor,
    wide: torch.dtype,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Pending entries and the current token as the last: (rows, L + 1, ...), zero elsewhere."""
    live = torch.arange(ring_x.shape[1], device=x.device) < pending[:, None]
    dts = torch.where(live[..., None], ring_dt[slots].to(wide), 0.0)
    xs = torch.where(live[..., None, None], ring_x[slots].to(wide), 0.0)
    bs = torch.where(live[..., None, None], ring_B[slots].to(wide), 0.0)
    return (
        torch.cat([dts, dt[:, None]], dim=1),
        torch.cat([xs, x[:, None]], dim=1),
        torch.cat([bs, B[:, None]], dim=1),
    )


def _weights(dts: torch.Tensor, rates: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """dt_j exp(A later(j)): (rows, entries, heads), and exp(A total): (rows, heads)."""
    later = torch.flip(torch.cumsum(torch.flip(dts, (1,)), dim=1), (1,))
    total = later[:, 0] if dts.shape[1] else dts.sum(dim=1)
    later = torch.cat([later[:, 1:], torch.zeros_like(later[:, :1])], dim=1)
    return dts * torch.exp(rates * later), torch.exp(rates * total)


def _fold(
    old: torch.Tensor,
    weight: torch.Tensor,
    decay: torch.Tensor,
    xs: torch.Tensor,
    bs: torch.Tensor,
) -> torch.Tensor:
    """exp(A total) S0 + sum_j weight_j x_j B_j^T."""
    rows, heads, headdim, dstate = old.shape
    groups = bs.shape[2]
    inputs = (weight[..., None] * xs).permute(0, 2, 3, 1)  # (rows, heads, headdim, entries)
    inputs = inputs.reshape(rows, groups, heads // groups * headdim, xs.shape[1])
    added = inputs @ bs.transpose(1, 2)
    return decay[..., None, None] * old + added.view(rows, heads, headdim, dstate)
