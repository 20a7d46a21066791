"""One decode step of the recurrence: the state is read and written at every token.

S = exp(dt A) S + dt x B^T,   y = S C + D x        (Dao and Gu 2024, arXiv 2405.21060)
"""

from __future__ import annotations

import torch
from ssmcore_kernels.checks import check_shape
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
        state: (slots, heads, headdim, dstate), state dtype; updated in place.
        read_slots: (rows,), int32.
        write_slots: (rows,), int32; with `query_start_loc` (rows, 1 + S): the state after the row's
            token `j` goes to `write_slots[row, j]`. A row whose (first) write slot is 0 is padding:
            its output is zero and no slot changes.
        query_start_loc: (rows + 1,), int32, or None for one token a row.
        out: where y goes, or None to allocate it.

    Returns:
        y: like x. On a GPU padding rows rewrite the null slot with its own content.
    """
    heads, headdim = x.shape[1:]
    check_shape("state", state, (state.shape[0], heads, headdim, B.shape[2]))
    check_shape("dt", dt, (x.shape[0], heads))
    check_shape("C", C, tuple(B.shape))
    wide = torch.promote_types(x.dtype, torch.float32)
    dt = time_step(dt, dt_bias, dt_limit)
    decay = torch.exp(dt * A.to(dt.dtype))
    xs = x.to(wide)
    scaled = dt[..., None].to(wide) * xs
    if query_start_loc is None:
        check_shape("write_slots", write_slots, (x.shape[0],))
        if x.device.type == "cpu" and state[0].is_contiguous():
            y = _advance_on_cpu(
                state, read_slots, write_slots, decay.to(wide), scaled, B.to(wide), C.to(wide)
            )
        else:
            y = _advance(
                state, read_slots, write_slots, decay.to(wide), scaled, B.to(wide), C.to(wide)
            )
        y = y + D.to(wide)[:, None] * xs
        y = torch.where((write_slots > 0)[:, None, None], y, 0.0)
    else:
        y = _advance_several(
            state,
            read_slots,
            write_slots,
            query_start_loc,
            decay.to(wide),
            scaled,
            B.to(wide),
            C.to(wide),
        )
        live = (write_slots[:, 0] > 0).repeat_interleave(
            (query_start_loc[1:] - query_start_loc[:-1]).long(), output_size=x.shape[0]
        )
        y = torch.where(live[:, None, None], y + D.to(wide)[:, None] * xs, 0.0)
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
) -> torch.Tensor:
    """Row by row in place: a state stays in cache between its update and its product with C."""
    rows, heads, headdim = scaled.shape
    groups = B.shape[1]
    per_group = heads // groups
    y = scaled.new_zeros(rows, heads, headdim)
    for row, (read, write) in enumerate(
        zip(read_slots.tolist(), write_slots.tolist(), strict=True)
    ):
        if write == 0:
            continue
        step = decay[row][:, None, None]
        if state.dtype == scaled.dtype:
            whole = torch.mul(state[read], step, out=state[write])
        else:
            whole = state[read].to(scaled.dtype) * step
        grouped = whole.view(groups, per_group * headdim, -1)
        grouped.baddbmm_(scaled[row].view(groups, -1, 1), B[row][:, None, :])
        torch.bmm(grouped, C[row][:, :, None], out=y[row].view(groups, -1, 1))
        if state.dtype != scaled.dtype:
            state[write] = whole
    return y


def _advance(
    state: torch.Tensor,
    read_slots: torch.Tensor,
    write_slots: torch.Tensor,
    decay: torch.Tensor,
    scaled: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
) -> torch.Tensor:
    """All rows at once, without a look at the slots: may run under graph capture."""
    per_group = scaled.shape[1] // B.shape[1]
    write = write_slots.long()
    live = (write > 0)[:, None, None, None]
    old = state[torch.where(write > 0, read_slots.long(), 0)].to(scaled.dtype)
    new = old * decay[..., None, None]
    new = new + scaled[..., None] * B.repeat_interleave(per_group, dim=1)[:, :, None, :]
    y = (new @ C.repeat_interleave(per_group, dim=1)[..., None]).squeeze(-1)
    state[write] = torch.where(live, new.to(state.dtype), state[0])
    return y


def _advance_several(
    state: torch.Tensor,
    read_slots: torch.Tensor,
    write_slots: torch.Tensor,
    query_start_loc: torch.Tensor,
    decay: torch.Tensor,
    scaled: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
) -> torch.Tensor:
    """Up to `1 + S` tokens a row; the state goes on unrounded from token to token."""
    heads = scaled.shape[1]
    per_group = heads // B.shape[1]
    loc = query_start_loc.long()
    lens = loc[1:] - loc[:-1]
    whole = state[read_slots.long()].to(scaled.dtype)
    y = torch.zeros_like(scaled)
    for nth in range(write_slots.shape[1]):
        write = write_slots[:, nth].long()
        live = (nth < lens) & (write_slots[:, 0] > 0) & (write > 0)
        token = torch.where(live, loc[:-1] + nth, 0)
        whole = whole * decay[token][..., None, None]
        outer = scaled[token][..., None]
        whole = whole + outer * B[token].repeat_interleave(per_group, dim=1)[:, :, None, :]
        result = (whole @ C[token].repeat_interleave(per_group, dim=1)[..., None]).squeeze(-1)
        keep = torch.where(live[:, None, None, None], whole.to(state.dtype), state[0])
        state[torch.where(live, write, 0)] = keep
        y.index_add_(0, token, torch.where(live[:, None, None], result, 0.0))
    return y
