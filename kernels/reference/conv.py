"""Causal depthwise convolution over short windows: packed prefills, and the one-token update.

A row's conv state is its last `d_conv - 1` inputs, oldest first. Work is done in float32 (float64
for float64 inputs); the outputs come in the inputs' dtype. A CPU goes row by row over views; other
devices gather, so that nothing waits for a slot id to come back.
"""

from __future__ import annotations

import itertools

import torch
from ssmcore_kernels.checks import BOOL, FLOATS, INTS, check, check_dims, is_host
from torch.nn.functional import silu

BLOCK_TOKENS = 64  # so many rows of activations stay in a CPU core's cache between the taps


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
        read_slots: (rows,), int32; counts only where has_initial_states: (rows,), bool; what stands
            in other rows' slots, NaN or not, changes nothing.
        write_rows, write_ends, write_slots: (writes,), int32: `write_slots` receive the last
            `d_conv - 1` inputs of their row before the packed token offset `write_ends`, what came
            before the row's first token included. All reads come before all writes.
        activation: "silu" or None.

    Returns:
        (tokens, conv_dim), activation dtype.

    Raises:
        ValueError: an argument of another shape, dtype or device.
    """
    past = _check(x, weight, bias, conv_state, activation)
    device, rows, writes = x.device, read_slots.shape[0], write_slots.shape[0]
    check("query_start_loc", query_start_loc, "(rows + 1,)", (rows + 1,), INTS, device)
    check("read_slots", read_slots, "(rows,)", (rows,), INTS, device)
    check("has_initial_states", has_initial_states, "(rows,)", (rows,), BOOL, device)
    check("write_rows", write_rows, "(writes,)", (writes,), INTS, device)
    check("write_ends", write_ends, "(writes,)", (writes,), INTS, device)
    check("write_slots", write_slots, "(writes,)", (writes,), INTS, device)
    wide = torch.promote_types(x.dtype, torch.float32)
    initial = conv_state[read_slots.long()].to(wide)
    initial = torch.where(has_initial_states[:, None, None], initial, 0.0)
    taps = weight.to(wide).t().contiguous()
    bias = None if bias is None else bias.to(wide)
    if is_host(x):
        loc = query_start_loc.tolist()
        if loc[0] != 0 or loc[-1] != x.shape[0]:
            raise ValueError(
                f"query_start_loc: from {loc[0]} to {loc[-1]}; wanted 0 to the {x.shape[0]} tokens"
                " of x"
            )
        out = _prefill_rows(x, taps, bias, loc, initial, activation)
        ends = zip(write_rows.tolist(), write_ends.tolist(), strict=True)
        windows = [_window(x, loc[row], end, initial[row]) for row, end in ends]
        for slot, window in zip(write_slots.tolist(), windows, strict=True):
            conv_state[slot] = window
        return out
    padded, token_at = _behind_their_past(x.to(wide), query_start_loc.long(), initial)
    length = padded.shape[0] - past
    summed = padded[:length] * taps[0]
    for tap in range(1, past + 1):
        summed.addcmul_(padded[tap : tap + length], taps[tap])
    out = _finish(summed[token_at - past], bias, activation)
    write_at = (write_ends.long() + write_rows.long() * past)[:, None]
    windows_of = padded[write_at + torch.arange(past, device=device)]
    conv_state[write_slots.long()] = windows_of.to(conv_state.dtype)
    return out.to(x.dtype)


def _prefill_rows(
    x: torch.Tensor,
    taps: torch.Tensor,
    bias: torch.Tensor | None,
    loc: list[int],
    initial: torch.Tensor,
    activation: str | None,
) -> torch.Tensor:
    """Row by row, a block of tokens at a time, each block behind a view of what comes before it."""
    past = taps.shape[0] - 1
    step = max(BLOCK_TOKENS, past)
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    for row, (begin, end) in enumerate(itertools.pairwise(loc)):
        for start in range(begin, end, step):
            stop = min(start + step, end)
            if start == begin:
                seen = torch.cat([initial[row], x[start:stop].to(taps.dtype)])
            else:
                seen = x[start - past : stop].to(taps.dtype)
            length = stop - start
            part = seen[past:] * taps[past]
            for tap in range(past):
                part.addcmul_(seen[tap : tap + length], taps[tap])
            out[start:stop] = _finish(part, bias, activation)
    return out


def _window(x: torch.Tensor, begin: int, end: int, initial: torch.Tensor) -> torch.Tensor:
    """The last inputs before `end` of a row that begins at token `begin` behind `initial`."""
    past = initial.shape[0]
    if end - begin >= past:
        return x[end - past : end]
    return torch.cat([initial[end - begin :], x[begin:end].to(initial.dtype)])


def _behind_their_past(
    x: torch.Tensor, loc: torch.Tensor, initial: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows in one buffer, each behind its past, and where in it every token is."""
    tokens, dim = x.shape
    rows, past = initial.shape[:2]
    device = x.device
    index = torch.arange(rows, device=device)
    row_of = torch.repeat_interleave(index, loc[1:] - loc[:-1], output_size=tokens)
    token_at = torch.arange(tokens, device=device) + (row_of + 1) * past
    past_at = (loc[:-1] + index * past)[:, None] + torch.arange(past, device=device)
    padded = torch.empty(tokens + rows * past, dim, dtype=x.dtype, device=device)
    padded[token_at] = x
    padded[past_at] = initial
    return padded, token_at


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
        conv_state: (slots, d_conv - 1, conv_dim), conv dtype; updated in place. No row may write a
            slot that another reads or writes.
        read_slots: (rows,), int32.
        write_slots: (rows,), int32; with `query_start_loc` (rows, 1 + S): the window after the
            row's token `j` goes to `write_slots[row, j]`. A row whose (first) write slot is 0 is
            padding: its output is zero and no slot changes.
        query_start_loc: (rows + 1,), int32, at most 1 + S tokens a row, or None for one. Tokens
            behind the last row's are padding.
        activation: "silu" or None.

    Returns:
        Like x. On a CPU, one token a row, padding rows touch no slot; otherwise they rewrite the
        null slot with its own content, NaN included.

    Raises:
        ValueError: an argument of another shape, dtype or device.
    """
    _check(x, weight, bias, conv_state, activation)
    device, rows = x.device, read_slots.shape[0]
    check("read_slots", read_slots, "(rows,)", (rows,), INTS, device)
    wide = torch.promote_types(x.dtype, torch.float32)
    taps = weight.to(wide).t().contiguous()
    bias = None if bias is None else bias.to(wide)
    if query_start_loc is not None:
        check("query_start_loc", query_start_loc, "(rows + 1,)", (rows + 1,), INTS, device)
        width = write_slots.shape[-1]
        check("write_slots", write_slots, "(rows, 1 + S)", (rows, width), INTS, device)
        return _update_several(
            x, taps, bias, conv_state, read_slots, write_slots, activation, query_start_loc
        )
    check("x", x, "(rows, conv_dim)", (rows, x.shape[1]), (x.dtype,), device)
    check("write_slots", write_slots, "(rows,)", (rows,), INTS, device)
    if is_host(x):
        return _update_on_cpu(x, taps, bias, conv_state, read_slots, write_slots, activation)
    write = write_slots.long().clamp(min=0)
    live = write > 0
    old = conv_state[torch.where(live, read_slots.long(), 0)]
    out = _convolve(old, x, taps, bias, activation)
    new = torch.cat([old[:, 1:], x[:, None].to(old.dtype)], dim=1)
    conv_state[write] = torch.where(live[:, None, None], new, conv_state[0])
    return torch.where(live[:, None], out, 0.0).to(x.dtype)


def _update_on_cpu(
    x: torch.Tensor,
    taps: torch.Tensor,
    bias: torch.Tensor | None,
    conv_state: torch.Tensor,
    read_slots: torch.Tensor,
    write_slots: torch.Tensor,
    activation: str | None,
) -> torch.Tensor:
    """Live rows only, known by a look at the slots."""
    live = [row for row, slot in enumerate(write_slots.tolist()) if slot > 0]
    if len(live) < x.shape[0]:
        at = torch.tensor(live, dtype=torch.int64)
        out = torch.zeros_like(x, memory_format=torch.contiguous_format)
        if live:
            out[at] = _update_on_cpu(
                x[at], taps, bias, conv_state, read_slots[at], write_slots[at], activation
            )
        return out
    old = conv_state.index_select(0, read_slots)
    out = _convolve(old, x, taps, bias, activation).to(x.dtype)
    write = write_slots.long()
    conv_state[:, :-1].index_copy_(0, write, old[:, 1:])
    conv_state[:, -1].index_copy_(0, write, x.to(conv_state.dtype))
    return out


def _update_several(
    x: torch.Tensor,
    taps: torch.Tensor,
    bias: torch.Tensor | None,
    conv_state: torch.Tensor,
    read_slots: torch.Tensor,
    write_slots: torch.Tensor,
    activation: str | None,
    query_start_loc: torch.Tensor,
) -> torch.Tensor:
    """Up to `1 + S` tokens a row, token by token."""
    loc = query_start_loc.long()
    lens = loc[1:] - loc[:-1]
    real = write_slots[:, 0] > 0
    window = conv_state[torch.where(real, read_slots.long(), 0)].to(taps.dtype)
    out = torch.zeros_like(x, memory_format=torch.contiguous_format)
    for nth in range(write_slots.shape[1]):
        live = (nth < lens) & real
        token = torch.where(live, loc[:-1] + nth, 0)
        new = x[token].to(taps.dtype)
        result = _convolve(window, new, taps, bias, activation)
        window = torch.cat([window[:, 1:], new[:, None]], dim=1)
        keep = torch.where(live[:, None, None], window.to(conv_state.dtype), conv_state[0])
        conv_state[torch.where(live, write_slots[:, nth].long(), 0)] = keep
        out.index_add_(0, token, torch.where(live[:, None], result, 0.0).to(x.dtype))
    return out


def _convolve(
    old: torch.Tensor,
    x: torch.Tensor,
    taps: torch.Tensor,
    bias: torch.Tensor | None,
    activation: str | None,
) -> torch.Tensor:
    """Windows (rows, d_conv - 1, conv_dim) and the token behind each, x: (rows, conv_dim)."""
    past = taps.shape[0] - 1
    out = x * taps[past]
    for tap in range(past):
        out.addcmul_(old[:, tap].to(taps.dtype), taps[tap])
    return _finish(out, bias, activation)


def _finish(
    summed: torch.Tensor, bias: torch.Tensor | None, activation: str | None
) -> torch.Tensor:
    """Bias and activation, in place."""
    if bias is not None:
        summed += bias
    return silu(summed, inplace=True) if activation == "silu" else summed


def _check(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    conv_state: torch.Tensor,
    activation: str | None,
) -> int:
    """Check what both forms take; returns the length of a window of the past."""
    check_dims("x", x, "(tokens, conv_dim)", 2)
    check_dims("weight", weight, "(conv_dim, d_conv)", 2)
    check_dims("conv_state", conv_state, "(slots, d_conv - 1, conv_dim)", 3)
    dim, width, device = x.shape[1], weight.shape[1], x.device
    if width < 2:
        raise ValueError(f"weight: d_conv {width}; wanted 2 or more")
    check("weight", weight, "(conv_dim, d_conv)", (dim, width), FLOATS, device)
    if bias is not None:
        check("bias", bias, "(conv_dim,)", (dim,), FLOATS, device)
    shape = (conv_state.shape[0], width - 1, dim)
    check("conv_state", conv_state, "(slots, d_conv - 1, conv_dim)", shape, FLOATS, device)
    if activation not in ("silu", None):
        raise ValueError(f'activation: {activation!r}; wanted "silu" or None')
    return width - 1
