"""Prefill by the chunked form of the recurrence (SSD).

Source: Dao and Gu 2024, arXiv 2405.21060, section 6.

With cum the running sum of dt A inside a chunk and S the state before it:
    y_i = exp(cum_i) S C_i + sum_{j<=i} (C_i . B_j) exp(cum_i - cum_j) dt_j x_j + D x_i
    S' = exp(cum_last) S + sum_j exp(cum_last - cum_j) dt_j x_j B_j^T
Chunks never span rows and may have any length. A CPU goes from chunk to chunk in place, in short
spans, so that the quadratic part stays small and in cache; elsewhere, and where gradients are
wanted, all chunks go at once, padded to the longest.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator

import torch
from ssmcore_kernels.checks import BOOL, FLOATS, INTS, check, check_mixer, is_host
from ssmcore_kernels.reference.time_step import time_step

SPAN_TOKENS = 64  # quadratic work per span against a pass over the state per span: measured

# exp below these is near or under the least normal number, where arithmetic is 30 times slower; a
# decay this strong leaves nothing of what it decays
LEAST_EXPONENT = {torch.float32: -80.0, torch.float64: -700.0}


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
        max_chunk_len: tokens of the longest chunk; read from `cu_chunk_seqlens` if None, for which
            a GPU has to be waited for.

    Returns:
        y: (tokens, heads, headdim), activation dtype; and the state after every chunk:
        (chunks, heads, headdim, dstate), float32 (float64 for float64 inputs).

    Raises:
        ValueError: an argument of another shape, dtype or device.
    """
    chunks, heads, headdim, dstate = _check(x, dt, A, B, C, D, dt_bias, cu_chunk_seqlens, seq_idx)
    wide = torch.promote_types(x.dtype, torch.float32)
    if initial_states is not None:
        shape = (initial_states.shape[0], heads, headdim, dstate)
        form = "(rows, heads, headdim, dstate)"
        check("initial_states", initial_states, form, shape, FLOATS, x.device)
        initial_states = initial_states.to(wide)
    steps = time_step(dt, dt_bias, dt_limit).to(wide)
    rates, skip = A.to(wide), D.to(wide)
    if is_host(x) and not _wants_gradients(x, dt, A, B, C, D, dt_bias, initial_states):
        y = torch.empty_like(x, memory_format=torch.contiguous_format)
        states = x.new_empty((chunks, heads, headdim, dstate), dtype=wide)
        scan = _scan_in_place(
            y, x, steps, rates, B, C, skip, cu_chunk_seqlens.tolist(), seq_idx.tolist(),
            initial_states,
        )  # fmt: skip
        for chunk, state in enumerate(scan):
            states[chunk] = state
        return y, states
    if max_chunk_len is None:
        max_chunk_len = int((cu_chunk_seqlens[1:] - cu_chunk_seqlens[:-1]).max())
    return _scan_padded(
        x, steps, rates, B, C, skip, cu_chunk_seqlens.long(), seq_idx.long(), initial_states,
        max_chunk_len,
    )  # fmt: skip


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
        read_slots: (rows,), int32; counts only where has_initial_states: (rows,), bool; other rows
            start from zero, and what stands in their slots, NaN or not, changes nothing.
        write_chunks, write_slots: (writes,), int32: the state after chunk `write_chunks[i]` goes to
            slot `write_slots[i]`.

    The other arguments, the result and the errors are those of `ssd_chunk_scan`.
    """
    _, heads, headdim, dstate = _check(x, dt, A, B, C, D, dt_bias, cu_chunk_seqlens, seq_idx)
    device, rows, writes = x.device, read_slots.shape[0], write_slots.shape[0]
    shape = (state.shape[0], heads, headdim, dstate)
    check("state", state, "(slots, heads, headdim, dstate)", shape, FLOATS, device)
    check("read_slots", read_slots, "(rows,)", (rows,), INTS, device)
    check("has_initial_states", has_initial_states, "(rows,)", (rows,), BOOL, device)
    check("write_chunks", write_chunks, "(writes,)", (writes,), INTS, device)
    check("write_slots", write_slots, "(writes,)", (writes,), INTS, device)
    wide = torch.promote_types(x.dtype, torch.float32)
    prior = state[read_slots.long()].to(wide)
    prior = torch.where(has_initial_states[:, None, None, None], prior, 0.0)
    if is_host(x) and not _wants_gradients(x, dt, A, B, C, D, dt_bias, None):
        y = torch.empty_like(x, memory_format=torch.contiguous_format)
        slots_of: dict[int, list[int]] = {}
        for chunk, slot in zip(write_chunks.tolist(), write_slots.tolist(), strict=True):
            slots_of.setdefault(chunk, []).append(slot)
        scan = _scan_in_place(
            y, x, time_step(dt, dt_bias, dt_limit).to(wide), A.to(wide), B, C, D.to(wide),
            cu_chunk_seqlens.tolist(), seq_idx.tolist(), prior,
        )  # fmt: skip
        for chunk, whole in enumerate(scan):
            for slot in slots_of.get(chunk, ()):
                state[slot] = whole
        return y
    y, after = ssd_chunk_scan(
        x, dt, A, B, C, D=D, dt_bias=dt_bias, dt_limit=dt_limit, cu_chunk_seqlens=cu_chunk_seqlens,
        seq_idx=seq_idx, initial_states=prior, max_chunk_len=max_chunk_len,
    )  # fmt: skip
    state[write_slots.long()] = after[write_chunks.long()].to(state.dtype)
    return y


def _scan_in_place(
    y: torch.Tensor,
    x: torch.Tensor,
    dt: torch.Tensor,
    rates: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    skip: torch.Tensor,
    loc: list[int],
    row_of: list[int],
    initial_states: torch.Tensor | None,
) -> Iterator[torch.Tensor]:
    """Fill y chunk by chunk; yields the state after each, in a buffer that the next one reuses."""
    tokens, heads, headdim = x.shape
    groups, dstate = B.shape[1:]
    wide = dt.dtype
    if loc[0] != 0 or loc[-1] != tokens:
        raise ValueError(
            f"cu_chunk_seqlens: from {loc[0]} to {loc[-1]}; wanted 0 to the {tokens} tokens of x"
        )
    per_head = (dt * rates).t().contiguous()  # (heads, tokens)
    state = x.new_zeros((heads, headdim, dstate), dtype=wide)
    grouped = state.view(groups, -1, dstate)
    longest = min(SPAN_TOKENS, max(stop - start for start, stop in itertools.pairwise(loc)))
    square = x.new_empty(heads * longest * longest, dtype=wide)
    flat = [x.new_empty(longest * heads * headdim, dtype=wide) for _ in range(4)]
    for chunk, row in enumerate(row_of):
        if chunk == 0 or row != row_of[chunk - 1]:
            if initial_states is None:
                state.zero_()
            else:
                state.copy_(initial_states[row])
        for start in range(loc[chunk], loc[chunk + 1], SPAN_TOKENS):
            stop = min(start + SPAN_TOKENS, loc[chunk + 1])
            length = stop - start
            part = slice(start, stop)
            xs = x[part].to(wide)
            bs, cs = (t[part].to(wide).transpose(0, 1) for t in (B, C))  # (groups, length, dstate)
            cum = per_head[:, part].cumsum(dim=1)
            sized = [t[: length * heads * headdim] for t in flat]

            # what the state before the span gives
            carried = torch.bmm(cs, grouped.transpose(1, 2), out=sized[0].view(groups, length, -1))
            total = sized[1].view(length, heads, headdim)
            torch.mul(
                carried.view(groups, length, heads // groups, headdim).transpose(0, 1),
                _decay(cum).t().reshape(length, groups, heads // groups, 1),
                out=total.view(length, groups, heads // groups, headdim),
            )

            # what the span's own tokens give
            weight = square[: heads * length * length].view(heads, length, length)
            torch.sub(cum[:, :, None], cum[:, None, :], out=weight)
            _decay_(weight).tril_()
            weight.view(groups, -1, length, length).mul_(torch.bmm(cs, bs.transpose(1, 2))[:, None])
            inputs = torch.mul(xs, dt[part, :, None], out=sized[2].view(length, heads, headdim))
            own = sized[3].view(heads, length, headdim)
            torch.bmm(weight, inputs.transpose(0, 1), out=own)
            total.add_(own.transpose(0, 1)).addcmul_(xs, skip[:, None])
            y[part] = total

            # the state behind the span
            inputs.mul_(_decay(cum[:, -1:] - cum).t()[..., None])
            state.mul_(_decay(cum[:, -1])[:, None, None])
            grouped.baddbmm_(inputs.view(length, groups, -1).permute(1, 2, 0), bs)
        yield state


def _decay(exponent: torch.Tensor) -> torch.Tensor:
    """exp of what is never above zero."""
    return _decay_(exponent.clone())


def _decay_(exponent: torch.Tensor) -> torch.Tensor:
    """exp of what is never above zero but for rounding, in place; 0 below the least exponent."""
    least = LEAST_EXPONENT[exponent.dtype]
    exponent.clamp_(least, 0.0).exp_()
    return torch.threshold_(exponent, 1.001 * math.exp(least), 0.0)


def _scan_padded(
    x: torch.Tensor,
    dt: torch.Tensor,
    rates: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    skip: torch.Tensor,
    loc: torch.Tensor,
    row_of: torch.Tensor,
    initial_states: torch.Tensor | None,
    length: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """All chunks at once, padded to `length`; no in-place work, no look at a value."""
    tokens, heads, headdim = x.shape
    groups, dstate = B.shape[1:]
    chunks, per_group, wide = row_of.shape[0], heads // groups, dt.dtype
    lens = loc[1:] - loc[:-1]
    nth = torch.arange(length, device=x.device)
    valid = nth < lens[:, None]
    token = torch.where(valid, loc[:-1, None] + nth, 0)
    # padding has dt = 0 and so neither decays nor adds
    dt = torch.where(valid[..., None], dt[token], 0.0)
    cum = torch.cumsum(dt * rates, dim=1).transpose(1, 2)  # (chunks, heads, length)
    inputs = (x.to(wide)[token] * dt[..., None]).transpose(1, 2)  # (chunks, heads, length, headdim)
    inputs = torch.where(valid[:, None, :, None], inputs, 0.0)
    bs = torch.where(valid[..., None, None], B.to(wide)[token], 0.0).transpose(1, 2)
    cs = C.to(wide)[token].transpose(1, 2)  # (chunks, groups, length, dstate)

    # inside chunks: the later minus the earlier sum, never above zero
    span = (cum[..., :, None] - cum[..., None, :]).clamp(max=0.0)
    weight = torch.where(nth[:, None] >= nth, torch.exp(span), 0.0)
    products = cs @ bs.transpose(-1, -2)
    weight = weight.view(chunks, groups, per_group, length, length) * products[:, :, None]
    y = weight.view(chunks, heads, length, length) @ inputs

    # what each chunk adds to the state, then the states from chunk to chunk
    left = torch.exp((cum[..., -1:] - cum).clamp(max=0.0))
    scaled = (left[..., None] * inputs).view(chunks, groups, per_group, length, headdim)
    added = scaled.transpose(-1, -2) @ bs[:, :, None]
    added = added.view(chunks, heads, headdim, dstate)
    whole_decay = torch.exp(cum[..., -1])[..., None, None]
    before, after = _pass_states(added, whole_decay, row_of, initial_states)

    grouped = before.view(chunks, groups, per_group, headdim, dstate)
    carried = (cs[:, :, None] @ grouped.transpose(-1, -2)).view(chunks, heads, length, headdim)
    chunk_of = torch.repeat_interleave(lens, output_size=tokens)
    nth_of = torch.arange(tokens, device=x.device) - loc[chunk_of]
    y = (y + torch.exp(cum)[..., None] * carried).transpose(1, 2)[chunk_of, nth_of]
    y = y + skip[:, None] * x.to(wide)
    return y.to(x.dtype), after


def _pass_states(
    added: torch.Tensor,
    decay: torch.Tensor,
    row_of: torch.Tensor,
    initial_states: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """States before and after every chunk, from what each adds and how it decays the past.

    A scan by doubling: after k rounds a chunk has its 2^k nearest predecessors' share. The order of
    additions depends on a chunk's place in its row alone, never on other rows.
    """
    chunks = row_of.shape[0]
    first = torch.ones(chunks, dtype=torch.bool, device=row_of.device)
    first[1:] = row_of[1:] != row_of[:-1]
    at_first = first[:, None, None, None]
    start = torch.zeros_like(added)
    if initial_states is not None:
        start = torch.where(at_first, initial_states[row_of], 0.0)
    after = added + decay * start
    reach = torch.where(at_first, 0.0, decay)
    open_ = ~at_first  # false once a chunk has its whole row
    step = 1
    while step < chunks:
        # where, not a product with zero: another row's infinity must stay its own
        share = torch.where(open_[step:], reach[step:] * after[:-step], 0.0)
        after = torch.cat([after[:step], after[step:] + share])
        reach = torch.cat([reach[:step], reach[step:] * reach[:-step]])
        open_ = torch.cat([open_[:step], open_[step:] & open_[:-step]])
        step *= 2
    earlier = torch.cat([torch.zeros_like(after[:1]), after[:-1]])
    return torch.where(at_first, start, earlier), after


def _wants_gradients(*tensors: torch.Tensor | None) -> bool:
    return torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)


def _check(
    x: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    D: torch.Tensor,
    dt_bias: torch.Tensor,
    cu_chunk_seqlens: torch.Tensor,
    seq_idx: torch.Tensor,
) -> tuple[int, int, int, int]:
    """Check what both functions take; returns chunks, heads, headdim, dstate."""
    _, heads, headdim, _, dstate = check_mixer("tokens", x, dt, A, B, C, D, dt_bias)
    chunks = seq_idx.shape[0]
    form, shape = "(chunks + 1,)", (chunks + 1,)
    check("cu_chunk_seqlens", cu_chunk_seqlens, form, shape, INTS, x.device)
    check("seq_idx", seq_idx, "(chunks,)", (chunks,), INTS, x.device)
    return chunks, heads, headdim, dstate
