"""One decode step of ReplaySSM in one launch: output from old state and ring, flush where due.

Per head, with a the decay rate A, total = sum of all dt, later(j) = sum of dt after entry j:
    y = exp(a total) (S0 C) + sum_j dt_j exp(a later(j)) (B_j . C) x_j + D x
    S = exp(a total) S0 + sum_j dt_j exp(a later(j)) x_j B_j^T       (on a flush)
Each program owns a tile of one head's rows of the state, so it may read and write one slot.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from ssmcore_kernels.triton.math import time_step


@triton.jit
def _replay_kernel(
    x_ptr,
    dt_ptr,
    a_ptr,
    b_ptr,
    c_ptr,
    d_ptr,
    bias_ptr,
    out_ptr,
    state_ptr,
    ring_x_ptr,
    ring_dt_ptr,
    ring_b_ptr,
    read_slots_ptr,
    write_slots_ptr,
    write_pos_ptr,
    is_flush_ptr,
    dt_low,
    dt_high,
    heads_per_group,
    headdim,
    dstate,
    stride_x_row,
    stride_x_head,
    stride_dt_row,
    stride_dt_head,
    stride_b_row,
    stride_b_group,
    stride_c_row,
    stride_c_group,
    stride_out_row,
    stride_out_head,
    stride_state_slot,
    stride_state_head,
    stride_state_row,
    stride_rx_slot,
    stride_rx_entry,
    stride_rx_head,
    stride_rdt_slot,
    stride_rdt_entry,
    stride_rb_slot,
    stride_rb_entry,
    stride_rb_group,
    HAS_LIMIT: tl.constexpr,
    RING: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    row = tl.program_id(2).to(tl.int64)
    head = tl.program_id(1).to(tl.int64)
    group = head // heads_per_group
    p = tl.program_id(0) * BLOCK_P + tl.arange(0, BLOCK_P)
    n = tl.arange(0, BLOCK_N)
    j = tl.arange(0, RING)
    p_mask = p < headdim
    n_mask = n < dstate

    out = out_ptr + row * stride_out_row + head * stride_out_head + p
    write_slot = tl.load(write_slots_ptr + row).to(tl.int64)
    if write_slot == 0:
        tl.store(out, tl.zeros((BLOCK_P,), out_ptr.dtype.element_ty), mask=p_mask)
        return

    read_slot = tl.load(read_slots_ptr + row).to(tl.int64)
    pending = tl.load(write_pos_ptr + row)
    is_flush = tl.load(is_flush_ptr + row) != 0

    tile = head * stride_state_head + p[:, None] * stride_state_row + n[None, :]
    tile_mask = p_mask[:, None] & n_mask[None, :]
    state = tl.load(state_ptr + read_slot * stride_state_slot + tile, mask=tile_mask, other=0.0)
    state = state.to(tl.float32)

    a = tl.load(a_ptr + head)
    x = tl.load(x_ptr + row * stride_x_row + head * stride_x_head + p, mask=p_mask, other=0.0)
    b = tl.load(b_ptr + row * stride_b_row + group * stride_b_group + n, mask=n_mask, other=0.0)
    c = tl.load(c_ptr + row * stride_c_row + group * stride_c_group + n, mask=n_mask, other=0.0)
    c = c.to(tl.float32)
    dt = tl.load(dt_ptr + row * stride_dt_row + head * stride_dt_head)
    dt = time_step(dt, tl.load(bias_ptr + head), dt_low, dt_high, HAS_LIMIT)

    live = j < pending
    ring_dt = tl.load(
        ring_dt_ptr + write_slot * stride_rdt_slot + j * stride_rdt_entry + head,
        mask=live,
        other=0.0,
    )
    ring_b = tl.load(
        ring_b_ptr
        + write_slot * stride_rb_slot
        + j[:, None] * stride_rb_entry
        + group * stride_rb_group
        + n[None, :],
        mask=live[:, None] & n_mask[None, :],
        other=0.0,
    ).to(tl.float32)
    ring_x = tl.load(
        ring_x_ptr
        + write_slot * stride_rx_slot
        + j[:, None] * stride_rx_entry
        + head * stride_rx_head
        + p[None, :],
        mask=live[:, None] & p_mask[None, :],
        other=0.0,
    ).to(tl.float32)

    total = tl.sum(ring_dt, axis=0) + dt
    # sums of what comes after each entry: never negative, so no decay exceeds one
    later = tl.sum(tl.where(j[None, :] > j[:, None], ring_dt[None, :], 0.0), axis=1) + dt
    weight = ring_dt * tl.exp(a * later)
    decay = tl.exp(a * total)

    xf = x.to(tl.float32)
    bf = b.to(tl.float32)
    products = tl.sum(ring_b * c[None, :], axis=1)
    y = decay * tl.sum(state * c[None, :], axis=1)
    y += tl.sum((weight * products)[:, None] * ring_x, axis=0)
    y += (dt * tl.sum(bf * c, axis=0)) * xf + tl.load(d_ptr + head) * xf
    tl.store(out, y.to(out_ptr.dtype.element_ty), mask=p_mask)

    if is_flush:
        inputs = tl.trans(weight[:, None] * ring_x)
        folded = tl.dot(inputs, ring_b, input_precision="ieee")
        state = decay * state + folded + (dt * xf)[:, None] * bf[None, :]
        tl.store(
            state_ptr + write_slot * stride_state_slot + tile,
            state.to(state_ptr.dtype.element_ty),
            mask=tile_mask,
        )
    else:
        entry = ring_x_ptr + write_slot * stride_rx_slot + pending.to(tl.int64) * stride_rx_entry
        tl.store(entry + head * stride_rx_head + p, x, mask=p_mask)
        if tl.program_id(0) == 0:
            entry_dt = ring_dt_ptr + write_slot * stride_rdt_slot
            tl.store(entry_dt + pending.to(tl.int64) * stride_rdt_entry + head, dt)
            if head % heads_per_group == 0:
                entry_b = ring_b_ptr + write_slot * stride_rb_slot + group * stride_rb_group
                tl.store(entry_b + pending.to(tl.int64) * stride_rb_entry + n, b, mask=n_mask)


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
    """One replay step; same contract as `ssmcore_kernels.reference.replay.replay_state_update`.

    Args:
        x: (rows, heads, headdim), activation dtype.
        dt: (rows, heads), activation dtype, raw.
        A, D, dt_bias: (heads,), float32.
        B, C: (rows, groups, dstate), activation dtype.
        dt_limit: bounds of dt after softplus.
        state: (slots, heads, headdim, dstate), state dtype, last dimension contiguous.
        ring_x: (slots, L, heads, headdim), activation dtype; ring_dt: (slots, L, heads), float32;
            ring_B: (slots, L, groups, dstate), activation dtype.
        state_read_slots, write_slots, write_pos: (rows,), int32; is_flush: (rows,), bool.
        out: (rows, heads, headdim), or None to allocate it.

    Returns:
        y: (rows, heads, headdim), activation dtype; zero for padding rows.

    Source: the recurrence of arXiv 2405.21060 unrolled over the ring; ReplaySSM.
    """
    rows, heads, headdim = x.shape
    groups, dstate = B.shape[1:]
    if out is None:
        out = torch.empty_like(x, memory_format=torch.contiguous_format)
    block_p = min(32, triton.next_power_of_2(headdim))
    low, high = dt_limit
    _replay_kernel[(triton.cdiv(headdim, block_p), heads, rows)](
        x,
        dt,
        A,
        B,
        C,
        D,
        dt_bias,
        out,
        state,
        ring_x,
        ring_dt,
        ring_B,
        state_read_slots,
        write_slots,
        write_pos,
        is_flush.view(torch.uint8),
        low,
        high,
        heads // groups,
        headdim,
        dstate,
        x.stride(0),
        x.stride(1),
        dt.stride(0),
        dt.stride(1),
        B.stride(0),
        B.stride(1),
        C.stride(0),
        C.stride(1),
        out.stride(0),
        out.stride(1),
        state.stride(0),
        state.stride(1),
        state.stride(2),
        ring_x.stride(0),
        ring_x.stride(1),
        ring_x.stride(2),
        ring_dt.stride(0),
        ring_dt.stride(1),
        ring_B.stride(0),
        ring_B.stride(1),
        ring_B.stride(2),
        HAS_LIMIT=low > 0.0 or high != float("inf"),
        RING=max(16, triton.next_power_of_2(ring_x.shape[1])),
        BLOCK_P=block_p,
        BLOCK_N=triton.next_power_of_2(dstate),
        num_warps=4,
    )
    return out
