"""One decode step of ReplaySSM in torch: output from an old whole state and a ring of inputs.

With later(j) the sum of dt after entry j, the current token being the last entry:
    y = exp(A total) (S0 C) + sum_j dt_j exp(A later(j)) (B_j . C) x_j + D x
    S = exp(A total) S0 + sum_j dt_j exp(A later(j)) x_j B_j^T       (written on a flush)
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from ssmcore_kernels.checks import BOOL, FLOATS, INTS, WIDE, check, check_mixer, is_host
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
        state: (slots, heads, headdim, dstate), state dtype; updated in place on a flush. No row
            may write a slot that another reads or writes.
        ring_x: (slots, L, heads, headdim), activation dtype; ring_dt: (slots, L, heads), float32,
            after bias, softplus and limit; ring_B: (slots, L, groups, dstate), activation dtype.
            Entries `0..write_pos - 1` are pending; without a flush the token becomes `write_pos`.
        state_read_slots, write_slots, write_pos: (rows,), int32; is_flush: (rows,), bool.
        out: where y goes, or None to allocate it.

    Returns:
        y: like x; zero for padding rows (write slot 0). They and entries that nothing is written to
        are at most rewritten with their own content, NaN included.

    Raises:
        ValueError: an argument of another shape, dtype or device.
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
    wide = torch.promote_types(x.dtype, torch.float32)
    live = write_slots > 0
    pending = torch.where(live, write_pos.long(), 0)
    rates, xs, bs, cs = A.to(wide), x.to(wide), B.to(wide), C.to(wide)
    new_dt = time_step(dt, dt_bias, dt_limit).to(wide)

    ring = _pending(ring_x, ring_dt, ring_B, write_slots.long().clamp(min=0), pending, wide)
    entries = _Entries(
        torch.cat([ring.dt, new_dt[:, None]], dim=1),
        torch.cat([ring.x, xs[:, None]], dim=1),
        torch.cat([ring.B, bs[:, None]], dim=1),
    )
    weight, decay = _weights(entries.dt, rates)
    products = (entries.B * cs[:, None]).sum(dim=-1)
    products = products.repeat_interleave(heads // groups, dim=2)
    y = ((weight * products)[..., None] * entries.x).sum(dim=1) + D.to(wide)[:, None] * xs

    advance = _advance_on_cpu if is_host(x) else _advance
    carried = advance(
        state, state_read_slots, write_slots, live & is_flush, entries, weight, decay, cs
    )
    y = torch.where(live[:, None, None], y + decay[..., None] * carried, 0.0).to(x.dtype)
    append = live & ~is_flush
    slot, at = torch.where(live, write_slots, 0).long(), torch.where(append, pending, 0)
    for buffer, entry in ((ring_x, x), (ring_dt, new_dt), (ring_B, B)):
        mask = append.view(-1, *[1] * (entry.dim() - 1))
        buffer[slot, at] = torch.where(mask, entry.to(buffer.dtype), buffer[slot, at])
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
    entries = _pending(ring_x, ring_dt, ring_B, ring_slots.long(), pending, wide)
    weight, decay = _weights(entries.dt, A.to(wide))
    return _fold(state[state_read_slots.long()].to(wide), entries, weight, decay)


class _Entries(NamedTuple):
    """Inputs of every row, oldest first; zero where a row has none.

    dt: (rows, entries, heads); x: (rows, entries, heads, headdim);
    B: (rows, entries, groups, dstate).
    """

    dt: torch.Tensor
    x: torch.Tensor
    B: torch.Tensor


def _pending(
    ring_x: torch.Tensor,
    ring_dt: torch.Tensor,
    ring_B: torch.Tensor,
    slots: torch.Tensor,
    pending: torch.Tensor,
    wide: torch.dtype,
) -> _Entries:
    """The rings of rows; what stands behind `pending`, NaN or not, counts for nothing."""
    size = ring_x.shape[1]
    if is_host(slots):  # no further than the fullest ring
        size = int(pending.max()) if len(pending) else 0
    live = torch.arange(size, device=slots.device) < pending[:, None]
    dt, x, B = (ring[:, :size][slots].to(wide) for ring in (ring_dt, ring_x, ring_B))
    return _Entries(
        torch.where(live[..., None], dt, 0.0),
        torch.where(live[..., None, None], x, 0.0),
        torch.where(live[..., None, None], B, 0.0),
    )


def _weights(dts: torch.Tensor, rates: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """dt_j exp(A later(j)): (rows, entries, heads), and exp(A total): (rows, heads)."""
    down_to = torch.flip(torch.cumsum(torch.flip(dts, (1,)), dim=1), (1,))
    down_to = torch.cat([down_to, dts.new_zeros(dts.shape[0], 1, dts.shape[2])], dim=1)
    return dts * torch.exp(rates * down_to[:, 1:]), torch.exp(rates * down_to[:, 0])


def _fold(
    old: torch.Tensor, entries: _Entries, weight: torch.Tensor, decay: torch.Tensor
) -> torch.Tensor:
    """exp(A total) S0 + sum_j weight_j x_j B_j^T, (rows, heads, headdim, dstate)."""
    rows, heads, headdim, dstate = old.shape
    count, groups = entries.B.shape[1:3]
    width = heads // groups * headdim
    inputs = (weight[..., None] * entries.x).reshape(rows, count, groups, width)
    inputs = inputs.permute(0, 2, 3, 1).reshape(rows * groups, width, count)
    bs = entries.B.transpose(1, 2).reshape(rows * groups, count, dstate)
    folded = old * decay[..., None, None]
    folded.view(rows * groups, width, dstate).baddbmm_(inputs, bs)
    return folded


def _advance_on_cpu(
    state: torch.Tensor,
    read_slots: torch.Tensor,
    write_slots: torch.Tensor,
    flush: torch.Tensor,
    entries: _Entries,
    weight: torch.Tensor,
    decay: torch.Tensor,
    C: torch.Tensor,
) -> torch.Tensor:
    """S0 C of live rows, and the folded states of rows that flush.

    States are read where they are: to gather them first takes several times as long.
    """
    rows, heads = decay.shape
    headdim, dstate = state.shape[2:]
    groups = C.shape[1]
    carried = C.new_zeros(rows, groups, heads // groups * headdim, 1)
    slots = zip(read_slots.tolist(), write_slots.tolist(), flush.tolist(), strict=True)
    for row, (read, write, due) in enumerate(slots):
        if write <= 0:
            continue
        old = state[read].to(C.dtype)
        torch.bmm(old.reshape(groups, -1, dstate), C[row, :, :, None], out=carried[row])
        if due:
            part = slice(row, row + 1)
            own = _Entries(*(tensor[part] for tensor in entries))
            state[write] = _fold(old[None], own, weight[part], decay[part])[0]
    return carried.view(rows, heads, headdim)


def _advance(
    state: torch.Tensor,
    read_slots: torch.Tensor,
    write_slots: torch.Tensor,
    flush: torch.Tensor,
    entries: _Entries,
    weight: torch.Tensor,
    decay: torch.Tensor,
    C: torch.Tensor,
) -> torch.Tensor:
    """The same without a look at a value: folds every row and keeps what flushes."""
    live = write_slots > 0
    old = state[torch.where(live, read_slots, 0).long()].to(C.dtype)
    cs = C.repeat_interleave(old.shape[1] // C.shape[1], dim=1)
    carried = (old @ cs[..., None]).squeeze(-1)
    slot = torch.where(live, write_slots, 0).long()
    folded = _fold(old, entries, weight, decay).to(state.dtype)
    state[slot] = torch.where(flush[:, None, None, None], folded, state[slot])
    return carried
