"""One decode step of the recurrence: the state is read and written at every token.

S = exp(dt A) S + dt x B^T,   y = S C + D x        (Dao and Gu 2024, arXiv 2405.21060)
"""

from __future__ import annotations

import torch
from ssmcore_kernels.checks import FLOATS, INTS, check, check_mixer, is_host
from ssmcore_kernels.reference.time_step import time_step


def selective_state_update(
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
    read_slots: torch.Tensor,
    write_slots: torch.Tensor,
    query_start_loc: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Advance one token a row, or a few with speculative tokens.

    Args:
        x: (rows, heads, headdim), activation dtype; (tokens, ...) with `query_start_loc`.
        dt: (rows, heads), raw; A, D, dt_bias: (heads,), float32.
        B, C: (rows, groups, dstate), activation dtype.
        dt_limit: bounds of dt after softplus.
        state: (slots, heads, headdim, dstate), state dtype; updated in place, rounded only there.
            No row may write a slot that another reads or writes.
        read_slots: (rows,), int32.
        write_slots: (rows,), int32; with `query_start_loc` (rows, 1 + S): the state after the row's
            token `j` goes to `write_slots[row, j]`. A row whose (first) write slot is 0 is padding:
            its output is zero and no slot changes.
        query_start_loc: (rows + 1,), int32, at most 1 + S tokens a row, or None for one. Tokens
            behind the last row's are padding.
        out: like x, where y goes, or None to allocate it.

    Returns:
        y: like x. On a CPU, one token a row and slots without gaps inside, padding rows touch no
        slot; otherwise they rewrite the null slot with its own content, NaN included.

    Raises:
        ValueError: an argument of another shape, dtype or device.
    """
    count, heads, headdim, _, dstate = check_mixer("rows", x, dt, A, B, C, D, dt_bias)
    device, rows = x.device, read_slots.shape[0]
    shape = (state.shape[0], heads, headdim, dstate)
    check("state", state, "(slots, heads, headdim, dstate)", shape, FLOATS, device)
    if out is not None:
        check("out", out, "(rows, heads, headdim)", (count, heads, headdim), (x.dtype,), device)
    if query_start_loc is None:
        check("read_slots", read_slots, "(rows,)", (count,), INTS, device)
        check("write_slots", write_slots, "(rows,)", (count,), INTS, device)
    else:
        check("read_slots", read_slots, "(rows,)", (rows,), INTS, device)
        check("query_start_loc", query_start_loc, "(rows + 1,)", (rows + 1,), INTS, device)
        width = write_slots.shape[-1]
        check("write_slots", write_slots, "(rows, 1 + S)", (rows, width), INTS, device)
    wide = torch.promote_types(x.dtype, torch.float32)
    steps = time_step(dt, dt_bias, dt_limit).to(wide)
    decay = torch.exp(steps * A.to(wide))
    xs, bs, cs, skip = x.to(wide), B.to(wide), C.to(wide), D.to(wide)
    scaled = steps[..., None] * xs
    direct = skip[:, None] * xs
    if query_start_loc is not None:
        y = _advance_several(
            state, read_slots, write_slots, query_start_loc, decay, scaled, bs, cs, direct
        )
    elif is_host(x) and state[0].is_contiguous():
        y = _advance_on_cpu(state, read_slots, write_slots, decay, scaled, bs, cs, direct)
    else:
        y = _advance(state, read_slots, write_slots, decay, scaled, bs, cs, direct)
    y = y.to(x.dtype)
    return y if out is None else out.copy_(y)


def _advance_on_cpu(
    state: torch.Tensor,
    read_slots: torch.Tensor,
    write_slots: torch.Tensor,
    decay: torch.Tensor,
    scaled: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    direct: torch.Tensor,
) -> torch.Tensor:
    """Row by row in place: a state stays in cache between its update and its product with C."""
    rows, heads, headdim = scaled.shape
    groups, dstate = B.shape[1:]
    y = torch.zeros_like(scaled)
    same = state.dtype == scaled.dtype
    scratch = None if same else scaled.new_empty(heads, headdim, dstate)
    writes = write_slots.tolist()
    per_row = zip(
        read_slots.tolist(),
        writes,
        decay[..., None, None].unbind(),
        scaled.view(rows, groups, -1, 1).unbind(),
        B[:, :, None].unbind(),
        C[..., None].unbind(),
        y.view(rows, groups, -1, 1).unbind(),
        strict=True,
    )
    for read, write, factor, inputs, b, c, out in per_row:
        if write <= 0:
            continue
        new = state[write] if scratch is None else scratch
        old = new if same and read == write else state[read]
        torch.mul(old, factor, out=new)
        grouped = new.view(groups, -1, dstate)
        grouped.baddbmm_(inputs, b)
        torch.bmm(grouped, c, out=out)
        if scratch is not None:
            state[write] = scratch
    y += direct
    if min(writes, default=1) > 0:
        return y
    return torch.where((write_slots > 0)[:, None, None], y, 0.0)


def _advance(
    state: torch.Tensor,
    read_slots: torch.Tensor,
    write_slots: torch.Tensor,
    decay: torch.Tensor,
    scaled: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    direct: torch.Tensor,
) -> torch.Tensor:
    """All rows at once, without a look at the slots: may run under graph capture."""
    per_group = scaled.shape[1] // B.shape[1]
    write = write_slots.long().clamp(min=0)
    live = write > 0
    old = state[torch.where(live, read_slots.long(), 0)].to(scaled.dtype)
    new, y = _step(old, decay, scaled, B, C, per_group)
    state[write] = torch.where(live[:, None, None, None], new.to(state.dtype), state[0])
    return torch.where(live[:, None, None], y + direct, 0.0)


def _advance_several(
    state: torch.Tensor,
    read_slots: torch.Tensor,
    write_slots: torch.Tensor,
    query_start_loc: torch.Tensor,
    decay: torch.Tensor,
    scaled: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    direct: torch.Tensor,
) -> torch.Tensor:
    """Up to `1 + S` tokens a row; the state goes on unrounded from token to token."""
    per_group = scaled.shape[1] // B.shape[1]
    loc = query_start_loc.long()
    lens = loc[1:] - loc[:-1]
    real = write_slots[:, 0] > 0
    whole = state[torch.where(real, read_slots.long(), 0)].to(scaled.dtype)
    y = torch.zeros_like(scaled)
    for nth in range(write_slots.shape[1]):
        live = (nth < lens) & real
        token = torch.where(live, loc[:-1] + nth, 0)
        whole, result = _step(whole, decay[token], scaled[token], B[token], C[token], per_group)
        keep = torch.where(live[:, None, None, None], whole.to(state.dtype), state[0])
        state[torch.where(live, write_slots[:, nth].long(), 0)] = keep
        y.index_add_(0, token, torch.where(live[:, None, None], result + direct[token], 0.0))
    return y


def _step(
    state: torch.Tensor,
    decay: torch.Tensor,
    scaled: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    per_group: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """One token of every row: the new states and their products with C."""
    bs, cs = (tensor.repeat_interleave(per_group, dim=1) for tensor in (B, C))
    state = state * decay[..., None, None]
    state = state + scaled[..., None] * bs[:, :, None, :]
    return state, (state @ cs[..., None]).squeeze(-1)
