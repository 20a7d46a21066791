"""Reference kernels against the token-by-token recurrence in float64."""

from __future__ import annotations

import pytest
import torch
from ssmcore_kernels import for_device
from ssmcore_kernels.reference.conv import causal_conv1d_prefill, causal_conv1d_update
from ssmcore_kernels.reference.norm import add_rms_norm, gated_rms_norm, rms_norm
from ssmcore_kernels.reference.recurrence import conv_recurrence, ssd_recurrence
from ssmcore_kernels.reference.ssd import ssd_chunk_scan, ssd_prefill
from ssmcore_kernels.reference.state_update import selective_state_update

NAN = float("nan")
SHAPES = [
    (4, 8, 16, 1),
    (6, 5, 3, 2),
    (6, 4, 8, 3),
    (3, 80, 4, 3),
]  # heads, headdim, dstate, groups
LENGTHS = [[1], [2, 3, 1], [7, 8, 9], [1, 15, 16, 17], [5, 40, 3, 11]]


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def ints(values):
    return torch.tensor(values, dtype=torch.int32)


def mixer_inputs(gen, tokens, shape, dtype=torch.float64):
    heads, headdim, dstate, groups = shape
    draw = lambda *size: torch.randn(size, generator=gen, dtype=torch.float64).to(dtype)  # noqa: E731
    per_token = (
        draw(tokens, heads, headdim),
        draw(tokens, heads),
        draw(tokens, groups, dstate),
        draw(tokens, groups, dstate),
    )
    wide = torch.promote_types(dtype, torch.float32)
    A = -torch.exp(draw(heads)).to(wide)
    return per_token, A, {"D": draw(heads).to(wide), "dt_bias": draw(heads).to(wide)}


def chunk_metadata(lengths, computed, size):
    """Chunks that end at multiples of `size` of each row's own position."""
    cu, seq_idx, last = [0], [], []
    for row, (length, start) in enumerate(zip(lengths, computed, strict=True)):
        at = start
        while at < start + length:
            end = min(at // size * size + size, start + length)
            cu.append(cu[-1] + end - at)
            seq_idx.append(row)
            at = end
        last.append(len(seq_idx) - 1)
    return ints(cu), ints(seq_idx), last


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize("size", [1, 4, 16])
def test_chunk_scan_equals_the_recurrence(shape, lengths, size):
    gen = generator()
    (x, dt, B, C), A, rest = mixer_inputs(gen, sum(lengths), shape)
    heads, headdim, dstate, _ = shape
    computed = [3 * row for row in range(len(lengths))]
    cu, seq_idx, _ = chunk_metadata(lengths, computed, size)
    initial = torch.randn(len(lengths), heads, headdim, dstate, generator=gen, dtype=torch.float64)
    y, states = ssd_chunk_scan(
        x,
        dt,
        A,
        B,
        C,
        **rest,
        dt_limit=(0.05, 2.0),
        cu_chunk_seqlens=cu,
        seq_idx=seq_idx,
        initial_states=initial,
    )
    assert y.dtype == states.dtype == torch.float64
    start = 0
    for row, length in enumerate(lengths):
        part = slice(start, start + length)
        want_y, want_states = ssd_recurrence(
            x[part],
            dt[part],
            A,
            B[part],
            C[part],
            **rest,
            dt_limit=(0.05, 2.0),
            state=initial[row],
        )
        torch.testing.assert_close(y[part], want_y, rtol=1e-9, atol=1e-9)
        for chunk in (seq_idx == row).nonzero().flatten().tolist():
            token = int(cu[chunk + 1]) - start - 1
            torch.testing.assert_close(states[chunk], want_states[token], rtol=1e-9, atol=1e-9)
        start += length


def test_prefill_reads_and_writes_only_the_slots_it_is_given():
    shape = (4, 8, 16, 2)
    lengths, computed = [5, 9, 2], [3, 0, 7]
    (x, dt, B, C), A, rest = mixer_inputs(generator(), sum(lengths), shape)
    cu, seq_idx, last = chunk_metadata(lengths, computed, 4)
    state = torch.full((9, *shape[:3]), NAN, dtype=torch.float64)
    state[2] = 1.0
    state[5] = -1.0
    before = state.clone()
    y = ssd_prefill(
        x,
        dt,
        A,
        B,
        C,
        **rest,
        dt_limit=(0.0, float("inf")),
        cu_chunk_seqlens=cu,
        seq_idx=seq_idx,
        state=state,
        read_slots=ints([2, 8, 5]),
        has_initial_states=torch.tensor([True, False, True]),
        write_chunks=ints([last[0], 2, last[1], last[2]]),
        write_slots=ints([3, 6, 7, 5]),
    )
    assert not y.isnan().any()
    for slot in (0, 1, 4, 8):
        assert state[slot].isnan().all()
    assert state[2].equal(before[2])
    want, states = ssd_recurrence(x[5:14], dt[5:14], A, B[5:14], C[5:14], **rest)
    torch.testing.assert_close(y[5:14], want)
    torch.testing.assert_close(state[6], states[3])  # the chunk that ends at token 4
    torch.testing.assert_close(state[7], states[8])


@pytest.mark.parametrize("split", [(1,) * 23, (23,), (3, 20), (7, 1, 8, 7)])
def test_any_split_of_a_prompt_gives_the_same_state(split):
    shape = (4, 8, 16, 1)
    (x, dt, B, C), A, rest = mixer_inputs(generator(), 23, shape)
    state = torch.zeros(2, *shape[:3], dtype=torch.float64)
    outputs, at = [], 0
    for length in split:
        part = slice(at, at + length)
        cu, seq_idx, last = chunk_metadata([length], [at], 4)
        outputs.append(
            ssd_prefill(
                x[part],
                dt[part],
                A,
                B[part],
                C[part],
                **rest,
                dt_limit=(0.0, float("inf")),
                cu_chunk_seqlens=cu,
                seq_idx=seq_idx,
                state=state,
                read_slots=ints([1]),
                has_initial_states=torch.tensor([at > 0]),
                write_chunks=ints(last),
                write_slots=ints([1]),
            )
        )
        at += length
    want, states = ssd_recurrence(x, dt, A, B, C, **rest)
    torch.testing.assert_close(torch.cat(outputs), want)
    torch.testing.assert_close(state[1], states[-1])


def test_extreme_inputs_give_no_nan_and_no_infinity():
    tokens, shape = 4096, (2, 4, 8, 1)
    (x, _, B, C), _, rest = mixer_inputs(generator(), tokens, shape, torch.float32)
    A = torch.tensor([-1e-4, -50.0])
    dt = torch.linspace(-30, 30, tokens)[:, None].expand(tokens, 2)
    y, states = ssd_chunk_scan(
        x,
        dt,
        A,
        B,
        C,
        **rest,
        dt_limit=(0.0, float("inf")),
        cu_chunk_seqlens=ints([0, tokens]),
        seq_idx=ints([0]),
    )
    assert y.isfinite().all()
    assert states.isfinite().all()
    state = torch.zeros(2, *shape[:3])
    for t in (0, tokens - 1):
        out = selective_state_update(
            x[t : t + 1],
            dt[t : t + 1],
            A,
            B[t : t + 1],
            C[t : t + 1],
            **rest,
            dt_limit=(0.0, float("inf")),
            state=state,
            read_slots=ints([1]),
            write_slots=ints([1]),
        )
        assert out.isfinite().all()


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(
    ("dtype", "state_dtype", "bound"),
    [
        (torch.float64, torch.float64, 1e-12),
        (torch.float32, torch.float32, 2e-6),
        (torch.float32, torch.bfloat16, 1e-2),
        (torch.bfloat16, torch.float32, 1e-2),
    ],
)
def test_state_update_equals_the_recurrence(shape, dtype, state_dtype, bound):
    heads, headdim, dstate, _ = shape
    (x, dt, B, C), A, rest = mixer_inputs(generator(), 3, shape, dtype)
    state = torch.full((6, heads, headdim, dstate), NAN, dtype=state_dtype)
    state[1:3] = torch.randn(2, heads, headdim, dstate, generator=generator(1)).to(state_dtype)
    before = state.clone()
    y = selective_state_update(
        x,
        dt,
        A,
        B,
        C,
        **rest,
        dt_limit=(0.0, float("inf")),
        state=state,
        read_slots=ints([1, 0, 2]),
        write_slots=ints([4, 0, 2]),
    )
    assert y.dtype == dtype
    assert not y[1].any()
    for row, (read, write) in {0: (1, 4), 2: (2, 2)}.items():
        wide = {name: value.double() for name, value in rest.items()}
        want, states = ssd_recurrence(
            x[row : row + 1].double(),
            dt[row : row + 1].double(),
            A.double(),
            B[row : row + 1].double(),
            C[row : row + 1].double(),
            **wide,
            state=before[read].double(),
        )
        assert (y[row].double() - want[0]).norm() <= bound * want.norm()
        assert (state[write].double() - states[0]).norm() <= bound * states[0].norm()
    assert state[1].equal(before[1])
    for slot in (0, 3, 5):
        assert state[slot].isnan().all()


def test_the_form_without_a_look_at_the_slots_equals_the_one_for_cpus():
    from ssmcore_kernels.reference import state_update

    shape = (6, 5, 8, 3)
    (x, _, B, C), _, _ = mixer_inputs(generator(), 4, shape, torch.float32)
    decay = torch.rand(4, 6, generator=generator(2))
    states = [torch.randn(8, *shape[:3], generator=generator(1)) for _ in range(2)]
    reads, writes = ints([1, 2, 0, 3]), ints([1, 5, 0, 4])
    outputs = [
        form(state, reads, writes, decay, x, B, C, 2 * x)
        for form, state in zip(
            (state_update._advance, state_update._advance_on_cpu), states, strict=True
        )
    ]
    torch.testing.assert_close(outputs[0], outputs[1])
    assert not outputs[0][2].any()
    torch.testing.assert_close(states[0], states[1])


def test_state_update_takes_views_with_larger_strides():
    shape = (4, 8, 16, 2)
    (x, dt, B, C), A, rest = mixer_inputs(generator(), 2, shape, torch.float32)
    pages = torch.zeros(3, 4, 8 + 3, 16 + 5)
    plain = torch.zeros(3, 4, 8, 16)
    merged = torch.cat([x.flatten(1), B.flatten(1), C.flatten(1)], dim=1)
    xv = merged[:, :32].view(2, 4, 8)
    bv, cv = merged[:, 32:64].view(2, 2, 16), merged[:, 64:].view(2, 2, 16)
    slots = {"read_slots": ints([1, 2]), "write_slots": ints([1, 2])}
    limit = (0.0, float("inf"))
    view = pages[:, :, :8, :16]
    for _ in range(2):
        want = selective_state_update(x, dt, A, B, C, **rest, dt_limit=limit, state=plain, **slots)
        got = selective_state_update(xv, dt, A, bv, cv, **rest, dt_limit=limit, state=view, **slots)
        torch.testing.assert_close(got, want)
    torch.testing.assert_close(view, plain)
    assert not pages[:, :, 8:].any()
    assert not pages[..., 16:].any()


def test_accepting_some_drafts_equals_decoding_them():
    shape = (4, 8, 16, 2)
    lens, width = [3, 1, 2, 0], 3
    tokens = sum(lens)
    (x, dt, B, C), A, rest = mixer_inputs(generator(), tokens, shape)
    state = torch.full((12, *shape[:3]), NAN, dtype=torch.float64)
    reads = [9, 10, 11, 0]
    for slot in reads[:3]:
        state[slot] = torch.randn(shape[:3], generator=generator(slot), dtype=torch.float64)
    before = state.clone()
    writes = [[1, 2, 3], [4, 0, 0], [5, 6, 0], [0, 0, 0]]
    loc = ints([0, *torch.tensor(lens).cumsum(0).tolist()])
    y = selective_state_update(
        x,
        dt,
        A,
        B,
        C,
        **rest,
        dt_limit=(0.0, float("inf")),
        state=state,
        read_slots=ints(reads),
        write_slots=ints(writes),
        query_start_loc=loc,
    )
    assert width == len(writes[0])
    for row in range(3):
        part = slice(int(loc[row]), int(loc[row + 1]))
        want, states = ssd_recurrence(
            x[part], dt[part], A, B[part], C[part], **rest, state=before[reads[row]]
        )
        torch.testing.assert_close(y[part], want)
        for nth in range(lens[row]):
            torch.testing.assert_close(state[writes[row][nth]], states[nth])
    for slot in (0, 7, 8):
        assert state[slot].isnan().all()


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("width", [2, 4])
@pytest.mark.parametrize("lengths", [*LENGTHS, [1, 2, 3, 4, 5]])
def test_conv_prefill_equals_the_recurrence(lengths, width, bias):
    gen = generator()
    dim, rows, past = 6, len(lengths), width - 1
    tokens = sum(lengths)
    draw = lambda *size: torch.randn(size, generator=gen, dtype=torch.float64)  # noqa: E731
    x, weight = draw(tokens, dim), draw(dim, width)
    b = draw(dim) if bias else None
    conv_state = torch.full((2 * rows + 3, past, dim), NAN, dtype=torch.float64)
    has_initial = torch.tensor([row % 2 == 0 for row in range(rows)])
    for row in range(0, rows, 2):
        conv_state[1 + row] = draw(past, dim)
    before = conv_state.clone()
    loc = [0, *torch.tensor(lengths).cumsum(0).tolist()]
    out = causal_conv1d_prefill(
        x,
        weight,
        b,
        query_start_loc=ints(loc),
        conv_state=conv_state,
        read_slots=ints(range(1, rows + 1)),
        has_initial_states=has_initial,
        write_rows=ints([0, *range(rows)]),
        write_ends=ints([1, *loc[1:]]),
        write_slots=ints([2 * rows + 1, *range(rows + 1, 2 * rows + 1)]),
    )
    for row in range(rows):
        part = slice(loc[row], loc[row + 1])
        window = before[1 + row] if has_initial[row] else None
        want, windows = conv_recurrence(x[part], weight, b, window)
        torch.testing.assert_close(out[part], want)
        torch.testing.assert_close(conv_state[rows + 1 + row], windows[-1])
        if row == 0:
            torch.testing.assert_close(conv_state[2 * rows + 1], windows[0])
    assert conv_state[0].isnan().all()
    assert conv_state[2 * rows + 2].isnan().all()


def test_conv_update_equals_the_recurrence_and_leaves_padding_alone():
    gen = generator()
    dim, width = 6, 4
    draw = lambda *size: torch.randn(size, generator=gen, dtype=torch.float64)  # noqa: E731
    x, weight, bias = draw(3, dim), draw(dim, width), draw(dim)
    conv_state = torch.full((6, width - 1, dim), NAN, dtype=torch.float64)
    conv_state[1], conv_state[2] = draw(width - 1, dim), draw(width - 1, dim)
    before = conv_state.clone()
    out = causal_conv1d_update(
        x,
        weight,
        bias,
        conv_state=conv_state,
        read_slots=ints([1, 2, 0]),
        write_slots=ints([4, 2, 0]),
    )
    for row, (read, write) in enumerate([(1, 4), (2, 2)]):
        want, windows = conv_recurrence(x[row : row + 1], weight, bias, before[read])
        torch.testing.assert_close(out[row], want[0])
        torch.testing.assert_close(conv_state[write], windows[0])
    assert not out[2].any()
    assert conv_state[1].equal(before[1])
    for slot in (0, 3, 5):
        assert conv_state[slot].isnan().all()


def test_conv_update_with_drafts_keeps_a_window_for_every_token():
    gen = generator()
    dim, width = 6, 4
    draw = lambda *size: torch.randn(size, generator=gen, dtype=torch.float64)  # noqa: E731
    x, weight, bias = draw(4, dim), draw(dim, width), draw(dim)
    conv_state = torch.full((8, width - 1, dim), NAN, dtype=torch.float64)
    conv_state[6], conv_state[7] = draw(width - 1, dim), draw(width - 1, dim)
    before = conv_state.clone()
    out = causal_conv1d_update(
        x,
        weight,
        bias,
        conv_state=conv_state,
        read_slots=ints([6, 7, 0]),
        write_slots=ints([[1, 2, 3], [4, 0, 0], [0, 0, 0]]),
        query_start_loc=ints([0, 3, 4, 4]),
    )
    for part, read, writes in ((slice(0, 3), 6, [1, 2, 3]), (slice(3, 4), 7, [4])):
        want, windows = conv_recurrence(x[part], weight, bias, before[read])
        torch.testing.assert_close(out[part], want)
        for nth, slot in enumerate(writes):
            torch.testing.assert_close(conv_state[slot], windows[nth])
    for slot in (0, 5):
        assert conv_state[slot].isnan().all()


@pytest.mark.parametrize("group_size", [12, 4, 3, 1])
def test_gated_norm_is_per_group(group_size):
    gen = generator()
    x, z = (torch.randn(5, 12, generator=gen, dtype=torch.float64) for _ in range(2))
    weight = torch.randn(12, generator=gen, dtype=torch.float64)
    out = gated_rms_norm(x, z, weight, group_size=group_size, eps=1e-5)
    for start in range(0, 12, group_size):
        part = slice(start, start + group_size)
        gated = x[:, part] * z[:, part] / (1 + torch.exp(-z[:, part]))
        rms = gated.pow(2).mean(-1, keepdim=True).add(1e-5).sqrt()
        torch.testing.assert_close(out[:, part], gated / rms * weight[part])


def test_add_rms_norm_keeps_the_residual_in_its_own_dtype():
    gen = generator()
    x = torch.randn(3, 8, generator=gen).bfloat16()
    residual = torch.randn(3, 8, generator=gen)
    weight = torch.ones(8, dtype=torch.bfloat16)
    out, total = add_rms_norm(x, residual, weight, 1e-5)
    assert (out.dtype, total.dtype) == (torch.bfloat16, torch.float32)
    torch.testing.assert_close(total, residual + x.float())
    torch.testing.assert_close(out, rms_norm(total, weight, 1e-5))


def test_wrong_shapes_are_named():
    shape = (4, 8, 16, 2)
    (x, dt, B, C), A, rest = mixer_inputs(generator(), 2, shape, torch.float32)
    with pytest.raises(
        ValueError,
        match=r"state: \(3, 4, 8, 9\).* wanted \(slots, heads, headdim, dstate\) = \(3, 4, 8, 16\)",
    ):
        for_device("cpu").selective_state_update(
            x,
            dt,
            A,
            B,
            C,
            **rest,
            dt_limit=(0.0, float("inf")),
            state=torch.zeros(3, 4, 8, 9),
            read_slots=ints([1, 2]),
            write_slots=ints([1, 2]),
        )
