"""Prefill by the chunked form of the recurrence (SSD).

Source: Dao and Gu 2024, arXiv 2405.21060, section 6.

With cum the running sum of dt A inside a chunk and S the state before it:
    y_i = exp(cum_i) S C_i + sum_{j<=i} (C_i . B_j) exp(cum_i - cum_j) dt_j x_j + D x_i
    S' = exp(cum_last) S + sum_j exp(cum_last - cum_j) dt_j x_j B_j^T
Chunks never span rows and may have any length up to the longest.
"""

from __future__ import annotations

import torch
from ssmcore_kernels.checks import check_shape
from ssmcore_kernels.reference.time_step import time_step


def ssd_chunk_scan(
    x: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    *,
    D: torch.Tensor,
    dt_bias: torch.Tensor,
    dt_limit: tuple[float, float],
    cu_chunk_seqlens: torch.Tensor,
    seq_idx: torch.Tensor,
    initial_states: torch.Tensor | None = None,
    max_chunk_len: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Run packed rows through the recurrence, chunk by chunk; changes none of its arguments.

    Args:
        x: (tokens, heads, headdim), activation dtype.
        dt: (tokens, heads), raw; A, D, dt_bias: (heads,), float32.
        B, C: (tokens, groups, dstate), activation dtype.
        dt_limit: bounds of dt after softplus.
        cu_chunk_seqlens: (chunks + 1,), int32, token offsets of the chunks.
        seq_idx: (chunks,), int32, row of each chunk; a row's chunks stand together, in order.
        initial_states: (rows, heads, headdim, dstate), or None for zero.
        max_chunk_len: longest chunk in tokens; found out from `cu_chunk_seqlens` if None.

    Returns:
        y: (tokens, heads, headdim), activation dtype; and the state after every chunk:
        (chunks, heads, headdim, dstate), float32 (float64 for float64 inputs).
    """
    tokens, heads, headdim = x.shape
    groups, dstate = B.shape[1:]
    chunks = len(seq_idx)
    check_shape("dt", dt, (tokens, heads))
    check_shape("B", B, (tokens, groups, dstate))
    check_shape("C", C, (tokens, groups, dstate))
    check_shape("cu_chunk_seqlens", cu_chunk_seqlens, (chunks + 1,))
    per_group = heads // groups
    wide = torch.promote_types(x.dtype, torch.float32)
    loc = cu_chunk_seqlens.long()
    lens = loc[1:] - loc[:-1]
    length = int(lens.max()) if max_chunk_len is None else max_chunk_len

    # every chunk padded to the longest; padding has dt = 0 and so neither decays nor adds
    nth = torch.arange(length, device=x.device)
    valid = nth < lens[:, None]
    token = torch.where(valid, loc[:-1, None] + nth, 0)
    dt = torch.where(valid[..., None], time_step(dt, dt_bias, dt_limit)[token], 0.0)
    cum = torch.cumsum(dt * A.to(dt.dtype), dim=1).transpose(1, 2)  # (chunks, heads, length)
    dt = dt.transpose(1, 2)
    xs = x.to(wide)[token].transpose(1, 2)  # (chunks, heads, length, headdim)
    bs = B.to(wide)[token].transpose(1, 2)  # (chunks, groups, length, dstate)
    cs = C.to(wide)[token].transpose(1, 2)

    # inside chunks: the later minus the earlier sum, never above zero
    span = (cum[..., :, None] - cum[..., None, :]).clamp(max=0.0)
    causal = nth[:, None] >= nth
    weight = torch.where(causal, torch.exp(span), 0.0) * dt[..., None, :]
    products = cs @ bs.transpose(-1, -2)
    weight = weight.view(chunks, groups, per_group, length, length) * products[:, :, None]
    y = weight.view(chunks, heads, length, length) @ xs

    # what each chunk adds to the state, then the states from chunk to chunk
    left = torch.exp((cum[..., -1:] - cum).clamp(max=0.0)) * dt
    scaled = (left[..., None] * xs).view(chunks, groups, per_group, length, headdim)
    added = scaled.transpose(-1, -2) @ bs[:, :, None]
    added = added.view(chunks, heads, headdim, dstate)
    whole_decay = torch.exp(cum[..., -1])[..., None, None]
    before, after = _pass_states(added, whole_decay, seq_idx, initial_states)

    reach = torch.exp(cum)[..., None]
    grouped = before.view(chunks, groups, per_group, headdim, dstate)
    carried = (cs[:, :, None] @ grouped.transpose(-1, -2)).view(chunks, heads, length, headdim)
    chunk_of = torch.repeat_interleave(lens, output_size=tokens)
    nth_of = torch.arange(tokens, device=x.device) - loc[chunk_of]
    y = (y + reach * carried).transpose(1, 2)[chunk_of, nth_of]
    y = y + D.to(wide)[:, None] * x.to(wide)
    return y.to(x.dtype), after


def _pass_states(
    added: torch.Tensor,
    decay: torch.Tensor,
    seq_idx: torch.Tensor,
    initial_states: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """States before and after every chunk, from what each adds and how it decays the past."""
    chunks = len(seq_idx)
    row = seq_idx.long()
    first = torch.ones(chunks, dtype=torch.bool, device=row.device)
    first[1:] = row[1:] != row[:-1]
    start = torch.zeros_like(added[:1]).expand(chunks, -1, -1, -1)
    if initial_states is not None:
        start = initial_states.to(added.dtype)[row]
    before, after = [], []
    state = start[0]
    for chunk in range(chunks):
        state = torch.where(first[chunk], start[chunk], state)
        before.append(state)
        state = state * decay[chunk] + added[chunk]
        after.append(state)
    return torch.stack(before), torch.stack(after)


def ssd_prefill(
    x: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    *,
    D: torch.Tensor,
    dt_bias: torch.Tensor,
    dt_limit: tuple[float, float],
    cu_chunk_seqlens: torch.Tensor,
    seq_idx: torch.Tensor,
    state: torch.Tensor,
    read_slots: torch.Tensor,
    has_initial_states: torch.Tensor,
    write_chunks: torch.Tensor,
    write_slots: torch.Tensor,
    max_chunk_len: int | None = None,
) -> torch.Tensor:
    """`ssd_chunk_scan` on slots: reads the rows' states from the pool, writes those asked for.

    Args:
        state: (slots, heads, headdim, dstate), state dtype; updated in place after all reads.
        read_slots: (rows,), int32; read only where has_initial_states: (rows,), bool.
        write_chunks, write_slots: (writes,), int32: the state after chunk `write_chunks[i]` goes to
            slot `write_slots[i]`.

    The other arguments and the result are those of `ssd_chunk_scan`.
    """
    check_shape("state", state, (state.shape[0], *x.shape[1:], B.shape[2]))
    prior = state[read_slots.long()].to(torch.promote_types(x.dtype, torch.float32))
    prior = torch.where(has_initial_states[:, None, None, None], prior, 0.0)
    y, after = ssd_chunk_scan(
        x,
        dt,
        A,
        B,
        C,
        D=D,
        dt_bias=dt_bias,
        dt_limit=dt_limit,
        cu_chunk_seqlens=cu_chunk_seqlens,
        seq_idx=seq_idx,
        initial_states=prior,
        max_chunk_len=max_chunk_len,
    )
    state[write_slots.long()] = after[write_chunks.long()].to(state.dtype)
    return y
