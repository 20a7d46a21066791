"""What a step through FlashInfer leaves to be done, in rows that cross a block or end a prefill.

FlashInfer takes one slot a row and folds old entries only. `carry_states` copies the whole state
that a row reads to the slot that it writes; `settle_rows` folds what is pending, the new token
included: S = exp(a dt_j) S + dt_j x_j B_j^T for each entry j, oldest first.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

_HEADS = 8  # a program: few rows have work, so most programs only look


@triton.jit
def _settle_kernel(
    a_ptr,
    state_ptr,
    ring_x_ptr,
    ring_dt_ptr,
    ring_b_ptr,
    out_ptr,
    read_slots_ptr,
    write_slots_ptr,
    ring_start_ptr,
    pending_ptr,
    fold_count_ptr,
    heads,
    heads_per_group,
    headdim,
    dstate,
    stride_state_slot,
    stride_rx_slot,
    stride_rdt_slot,
    stride_rb_slot,
    CARRY: tl.constexpr,
    ENTRIES: tl.constexpr,
    HEADS: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    row = tl.program_id(1).to(tl.int64)
    first_head = tl.program_id(0) * HEADS
    p = tl.arange(0, BLOCK_P)
    n = tl.arange(0, BLOCK_N)
    p_mask = p < headdim
    n_mask = n < dstate
    inner = p[:, None] * dstate + n[None, :]
    mask = p_mask[:, None] & n_mask[None, :]

    write = tl.load(write_slots_ptr + row).to(tl.int64)
    pending = tl.load(pending_ptr + row)
    if CARRY:
        source = tl.load(read_slots_ptr + row).to(tl.int64)
        count = 0
        start = 0
        due = (write > 0) & (pending == 0) & (source != write)
    else:
        source = write
        count = tl.load(fold_count_ptr + row)
        start = tl.load(ring_start_ptr + row) + pending + 1 - count
        due = (write > 0) & (count > 0)

    if due:
        for nth in range(0, HEADS):
            head = (first_head + nth).to(tl.int64)
            if head < heads:
                tile = head * headdim * dstate + inner
                old = state_ptr + source * stride_state_slot + tile
                state = tl.load(old, mask=mask, other=0.0).to(tl.float32)
                if not CARRY:
                    a = tl.load(a_ptr + head)
                    group = head // heads_per_group
                    rx = ring_x_ptr + write * stride_rx_slot + head * ENTRIES * headdim + p
                    rdt = ring_dt_ptr + write * stride_rdt_slot + head * ENTRIES
                    rb = ring_b_ptr + write * stride_rb_slot + group * ENTRIES * dstate + n
                    for j in range(0, count):
                        entry = (start + j) % ENTRIES
                        dt = tl.load(rdt + entry)
                        x = tl.load(rx + entry * headdim, mask=p_mask, other=0.0).to(tl.float32)
                        b = tl.load(rb + entry * dstate, mask=n_mask, other=0.0).to(tl.float32)
                        state = state * tl.exp(a * dt) + (dt * x)[:, None] * b[None, :]
                new = state_ptr + write * stride_state_slot + tile
                tl.store(new, state.to(state_ptr.dtype.element_ty), mask=mask)

    if not CARRY:  # noqa: SIM102 (a constant: the other form has no such branch)
        if write <= 0:
            for nth in range(0, HEADS):
                head = first_head + nth
                if head < heads:
                    zeros = tl.zeros((BLOCK_P,), out_ptr.dtype.element_ty)
                    tl.store(out_ptr + (row * heads + head) * headdim + p, zeros, mask=p_mask)


def carry_states(
    *,
    state: torch.Tensor,
    state_read_slots: torch.Tensor,
    write_slots: torch.Tensor,
    pending: torch.Tensor,
) -> None:
    """Copy the state of rows that begin in another slot than they read, before the step.

    Args:
        state: (slots, heads, headdim, dstate), state dtype, a slot contiguous.
        state_read_slots, write_slots, pending: (rows,), int32. A row with entries pending has begun
            already; write slot 0 is a padding row.
    """
    heads, headdim, dstate = state.shape[1:]
    _settle_kernel[(triton.cdiv(heads, _HEADS), len(write_slots))](
        state,
        state,
        state,
        state,
        state,
        state,
        state_read_slots,
        write_slots,
        write_slots,
        pending,
        write_slots,
        heads,
        1,
        headdim,
        dstate,
        state.stride(0),
        0,
        0,
        0,
        CARRY=True,
        ENTRIES=1,
        HEADS=_HEADS,
        BLOCK_P=triton.next_power_of_2(headdim),
        BLOCK_N=triton.next_power_of_2(dstate),
        num_warps=4,
    )


def settle_rows(
    A: torch.Tensor,
    *,
    state: torch.Tensor,
    ring_x: torch.Tensor,
    ring_dt: torch.Tensor,
    ring_B: torch.Tensor,
    write_slots: torch.Tensor,
    ring_start: torch.Tensor,
    pending: torch.Tensor,
    fold_count: torch.Tensor,
    out: torch.Tensor,
) -> None:
    """Fold the newest `fold_count` entries of each row into its state, after the step.

    Args:
        A: (heads,), float32.
        state: (slots, heads, headdim, dstate), state dtype, a slot contiguous.
        ring_x: (slots, heads, L + 1, headdim), activation dtype; ring_dt: (slots, heads, L + 1),
            float32; ring_B: (slots, groups, L + 1, dstate), activation dtype; slots contiguous.
        write_slots: (rows,), int32; 0 for a padding row.
        ring_start, pending: (rows,), int32, as they were before the step.
        fold_count: (rows,), int32; 0 leaves a row alone.
        out: (rows, heads, headdim), contiguous; set to zero for padding rows.
    """
    heads, headdim, dstate = state.shape[1:]
    _settle_kernel[(triton.cdiv(heads, _HEADS), len(write_slots))](
        A,
        state,
        ring_x,
        ring_dt,
        ring_B,
        out,
        write_slots,
        write_slots,
        ring_start,
        pending,
        fold_count,
        heads,
        heads // ring_B.shape[1],
        headdim,
        dstate,
        state.stride(0),
        ring_x.stride(0),
        ring_dt.stride(0),
        ring_B.stride(0),
        CARRY=False,
        ENTRIES=ring_x.shape[2],
        HEADS=_HEADS,
        BLOCK_P=triton.next_power_of_2(headdim),
        BLOCK_N=triton.next_power_of_2(dstate),
        num_warps=4,
    )
