"""FlashInfer's `checkpointing_ssu` as its rules say, in plain torch and any dtype, for a CPU.

It takes what `ssmcore_kernels.flashinfer` hands on, so a whole strategy runs on it; a ring's entry
that is read but not pending would give NaN wherever rings are poisoned first.
"""

from __future__ import annotations

import torch


def make_scratch(rows, heads, buffer_len, dtype, device):
    return rows


def checkpointing_state_update(
    x,
    dt,
    A,
    B,
    C,
    *,
    D,
    dt_bias,
    dt_limit,
    state,
    ring_x,
    ring_dt,
    ring_B,
    ring_start,
    pending,
    slots,
    scratch,
    out,
):
    assert len(x) <= scratch, "more rows than the scratch was made for"
    heads, entries = ring_x.shape[1:3]
    group = torch.arange(heads) // (heads // B.shape[1])
    for row, slot in enumerate(slots.tolist()):
        if slot == 0:
            continue
        start, old = int(ring_start[slot]), int(pending[slot])
        assert 0 <= start < entries
        assert 0 <= old < entries
        whole = state[slot].clone()
        for entry in range(old):
            whole = folded(whole, slot, (start + entry) % entries, A, ring_x, ring_dt, ring_B)
        if old + 2 > entries:  # a full window: the old entries become the state
            state[slot] = whole
        at = (start + old) % entries
        ring_x[slot, :, at] = x[row]
        ring_B[slot, :, at] = B[row]
        step = torch.nn.functional.softplus(dt[row] + dt_bias).clamp(*dt_limit)
        ring_dt[slot, :, at] = step.to(ring_dt.dtype)
        whole = folded(whole, slot, at, A, ring_x, ring_dt, ring_B)
        out[row] = (whole * C[row][group][:, None]).sum(-1) + D[:, None] * x[row]
    return out


def folded(state, slot, entry, A, ring_x, ring_dt, ring_B):
    """The state with one ring entry taken in."""
    heads = len(A)
    group = torch.arange(heads) // (heads // ring_B.shape[1])
    dt = ring_dt[slot, :, entry]
    taken = (dt[:, None] * ring_x[slot, :, entry])[:, :, None] * ring_B[slot, group, entry][:, None]
    return state * torch.exp(A * dt)[:, None, None] + taken


def carry_states(*, state, state_read_slots, write_slots, pending):
    rows = zip(state_read_slots.tolist(), write_slots.tolist(), pending.tolist(), strict=True)
    for read, write, count in rows:
        if write > 0 and count == 0 and read != write:
            state[write] = state[read]


def settle_rows(
    A,
    *,
    state,
    ring_x,
    ring_dt,
    ring_B,
    write_slots,
    ring_start,
    pending,
    fold_count,
    out,
):
    entries = ring_x.shape[2]
    for row, slot in enumerate(write_slots.tolist()):
        if slot == 0:
            out[row] = 0.0
            continue
        count = int(fold_count[row])
        start = int(ring_start[row]) + int(pending[row]) + 1 - count
        for entry in range(start, start + count):
            state[slot] = folded(state[slot], slot, entry % entries, A, ring_x, ring_dt, ring_B)
