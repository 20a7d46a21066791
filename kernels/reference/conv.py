"""Causal depthwise convolution over short windows: packed prefills, and the one-token update.

A row's conv state is its last `d_conv - 1` inputs, oldest first. Work is done in float32 (float64
for float64 inputs); the outputs come in the inputs' dtype.
"""

from __future__ import annotations

import torch
from ssmcore_kernels.checks import check_shape


def causal_conv1d_prefill(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    *,
    query_start_loc: torch.Tensor,
    conv_state: torch.Tensor,
    read_slots: torch.Tensor,
    has_initial_states: torch.Tensor,
    write_rows: torch.Tensor,
    write_ends: torch.Tensor,
    write_slots: torch.Tensor,
    activation: str | None = "silu",
) -> torch.Tensor:
    """Convolve packed rows, each after its own past, and keep the windows that are asked for.

    Args:
        x: (tokens, conv_dim), activation dtype, rows packed one behind the other.
        weight: (conv_dim, d_conv); bias: (conv_dim,) or None.
        query_start_loc: (rows + 1,), int32, token offsets.
        conv_state: (slots, d_conv - 1, conv_dim), conv dtype; updated in place.
        read_slots: (rows,), int32; read only where has_initial_states: (rows,), bool.
        write_rows, write_ends, write_slots: (writes,), int32: `write_slots` receive the last
            `d_conv - 1` inputs of their row before the packed token offset `write_ends`.
        activation: "silu" or None.

    Returns:
        (tokens, conv_dim), activation dtype.
    """
    tokens, dim = x.shape
    width = weight.shape[1]
    past = width - 1
    rows = len(read_slots)
    check_shape("weight", weight, (dim, width))
    check_shape("query_start_loc", query_start_loc, (rows + 1,))
    check_shape("conv_state", conv_state, (conv_state.shape[0], past, dim))
    wide = torch.promote_types(x.dtype, torch.float32)
    device = x.device

    # every row's past in front of its tokens, in one buffer
    loc = query_start_loc.long()
    index = torch.arange(rows, device=device)
    row_of = torch.repeat_interleave(index, loc[1:] - loc[:-1], output_size=tokens)
    token_at = torch.arange(tokens, device=device) + (row_of + 1) * past
    past_at = (loc[:-1] + index * past)[:, None] + torch.arange(past, device=device)
    initial = conv_state[read_slots.long()].to(wide)
    padded = torch.empty(tokens + rows * past, dim, dtype=wide, device=device)
    padded[token_at] = x.to(wide)
    padded[past_at] = torch.where(has_initial_states[:, None, None], initial, 0.0)

    taps = weight.to(wide).t()
    length = padded.shape[0] - past
    summed = padded[:length] * taps[0]
    for tap in range(1, width):
        summed.addcmul_(padded[tap : tap + length], taps[tap])
    out = summed[token_at - past]
    if bias is not None:
        out += bias.to(wide)
    if activation == "silu":
        out = torch.nn.functional.silu(out)

    write_at = (write_ends.long() + write_rows.long() * past)[:, None]
    windows = padded[write_at + torch.arange(past, device=device)]
    conv_state[write_slots.long()] = windows.to(conv_state.dtype)
    return out.to(x.dtype)


def causal_conv1d_update(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    *,
    conv_state: torch.Tensor,
    read_slots: torch.Tensor,
    write_slots: torch.Tensor,
    activation: str | None = "silu",
    query_start_loc: torch.Tensor | None = None,
) -> torch.Tensor:
    """Convolve one token a row, or a few with speculative tokens, and keep the new windows.

    Args:
        x: (rows, conv_dim), activation dtype; (tokens, conv_dim) with `query_start_loc`.
        weight: (conv_dim, d_conv); bias: (conv_dim,) or None.
        conv_state: (slots, d_conv - 1, conv_dim), conv dtype; updated in place.
        read_slots: (rows,), int32.
        write_slots: (rows,), int32; with `query_start_loc` (rows, 1 + S): the window after the
            row's token `j` goes to `write_slots[row, j]`. A row whose (first) write slot is 0 is
            padding: its output is zero and no slot changes.
        query_start_loc: (rows + 1,), int32, or None for one token a row.
        activation: "silu" or None.

    Returns:
        Like x. On a GPU padding rows rewrite the null slot with its own content.
    """
    if query_start_loc is not None:
        return _update_several(
            x, weight, bias, conv_state, read_slots, write_slots, activation, query_start_loc
        )
    wide = torch.promote_types(x.dtype, torch.float32)
    check_shape("read_slots", read_slots, (x.shape[0],))
    write = write_slots.long()
    live = write > 0
    window = conv_state[torch.where(live, read_slots.long(), 0)].to(wide)
    window = torch.cat([window, x.to(wide)[:, None, :]], dim=1)
    out = _convolve(window, weight.to(wide), bias, activation)
    keep = torch.where(live[:, None, None], window[:, 1:].to(conv_state.dtype), conv_state[0])
    conv_state[write] = keep
    return torch.where(live[:, None], out, 0.0).to(x.dtype)


def _update_several(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    conv_state: torch.Tensor,
    read_slots: torch.Tensor,
    write_slots: torch.Tensor,
    activation: str | None,
    query_start_loc: torch.Tensor,
) -> torch.Tensor:
    """Up to `1 + S` tokens a row, token by token."""
    wide = torch.promote_types(x.dtype, torch.float32)
    loc = query_start_loc.long()
    lens = loc[1:] - loc[:-1]
    window = conv_state[read_slots.long()].to(wide)
    out = torch.zeros_like(x)
    taps = weight.to(wide)
    for nth in range(write_slots.shape[1]):
        write = write_slots[:, nth].long()
        live = (nth < lens) & (write_slots[:, 0] > 0) & (write > 0)
        token = torch.where(live, loc[:-1] + nth, 0)
        window = torch.cat([window, x[token].to(wide)[:, None, :]], dim=1)
        result = _convolve(window, taps, bias, activation)
        window = window[:, 1:]
        keep = torch.where(live[:, None, None], window.to(conv_state.dtype), conv_state[0])
        conv_state[torch.where(live, write, 0)] = keep
        out.index_add_(0, token, torch.where(live[:, None], result, 0.0).to(x.dtype))
    return out


def _convolve(
    window: torch.Tensor, taps: torch.Tensor, bias: torch.Tensor | None, activation: str | None
) -> torch.Tensor:
    """Windows (rows, d_conv, conv_dim) with taps (conv_dim, d_conv) to (rows, conv_dim)."""
    out = (window * taps.t()).sum(dim=1)
    if bias is not None:
        out = out + bias.to(out.dtype)
    return torch.nn.functional.silu(out) if activation == "silu" else out
