"""Causal convolution against its token-by-token form in float64."""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from kernel_builders import (
    NAN,
    assert_untouched,
    bools,
    draw,
    generator,
    ints,
    offsets,
    poisoned,
)
from ssmcore_kernels.reference import conv as module
from ssmcore_kernels.reference.conv import causal_conv1d_prefill, causal_conv1d_update
from ssmcore_kernels.reference.recurrence import conv_recurrence

pytestmark = pytest.mark.usefixtures("form")
DIM = 6
FIXTURES = [HealthCheck.function_scoped_fixture]


def filters(gen, width=4, bias=True, dtype=torch.float64):
    weight = draw(gen, DIM, width, dtype=dtype)
    return weight, draw(gen, DIM, dtype=dtype) if bias else None


def check_prefill(lengths, has_initial, writes, width=4, bias=True):
    """`writes`: (row, tokens of the row before the end) of every write, one slot each."""
    gen, rows, past = generator(), len(lengths), width - 1
    loc = offsets(lengths)
    x = draw(gen, loc[-1], DIM + 2)[:, 2:]
    weight, b = filters(gen, width, bias)
    pool = poisoned(
        1 + rows + len(writes) + 1,
        past,
        DIM,
        but=[1 + row for row in range(rows) if has_initial[row]],
    )
    before = pool.clone()
    targets = range(1 + rows, 1 + rows + len(writes))
    out = causal_conv1d_prefill(
        x,
        weight,
        b,
        query_start_loc=ints(loc),
        conv_state=pool,
        read_slots=ints(range(1, rows + 1)),
        has_initial_states=bools(has_initial),
        write_rows=ints(row for row, _ in writes),
        write_ends=ints(loc[row] + end for row, end in writes),
        write_slots=ints(targets),
    )
    assert out.dtype == torch.float64
    windows = []
    for row in range(rows):
        part = slice(loc[row], loc[row + 1])
        window = before[1 + row] if has_initial[row] else None
        want, after = conv_recurrence(x[part], weight, b, window)
        torch.testing.assert_close(out[part], want)
        windows.append(after)
    for slot, (row, end) in zip(targets, writes, strict=True):
        assert torch.equal(pool[slot], windows[row][end - 1])
    assert_untouched(pool, before, targets)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("width", [2, 4])
@pytest.mark.parametrize("lengths", [[1], [2, 3, 1], [7, 8, 9], [1, 15, 16, 17], [2, 64, 65, 131]])
def test_prefill_equals_the_recurrence(lengths, width, bias):
    has_initial = [row % 2 == 0 for row in range(len(lengths))]
    check_prefill(lengths, has_initial, list(enumerate(lengths)), width, bias)


@st.composite
def prefills(draw_):
    lengths = draw_(st.lists(st.integers(1, 9), min_size=1, max_size=5))
    initial = [draw_(st.booleans()) for _ in lengths]
    row = st.integers(0, len(lengths) - 1)
    writes = draw_(
        st.lists(row.flatmap(lambda r: st.tuples(st.just(r), st.integers(1, lengths[r]))))
    )
    return lengths, initial, writes


@settings(max_examples=60, deadline=None, suppress_health_check=FIXTURES)
@given(prefills())
def test_prefill_keeps_the_window_at_every_end_asked_for(case):
    check_prefill(*case)


@pytest.mark.parametrize("block", [3, 5])
def test_blocks_of_tokens_meet_without_a_seam(monkeypatch, block):
    monkeypatch.setattr(module, "BLOCK_TOKENS", block)
    check_prefill([1, 2, 3, 4, 5, 6, 11], [True] * 7, [(row, 1) for row in range(7)])


@pytest.mark.parametrize("split", [(1,) * 13, (13,), (2, 1, 10), (5, 3, 5)])
def test_any_split_of_a_prompt_gives_the_same_outputs_and_window(split):
    gen = generator()
    x, (weight, bias) = draw(gen, 13, DIM), filters(gen)
    pool = poisoned(4, 3, DIM)
    outputs, at = [], 0
    for length in split:
        outputs.append(
            causal_conv1d_prefill(
                x[at : at + length],
                weight,
                bias,
                query_start_loc=ints([0, length]),
                conv_state=pool,
                read_slots=ints([2]),
                has_initial_states=bools([at > 0]),
                write_rows=ints([0]),
                write_ends=ints([length]),
                write_slots=ints([2]),
            )
        )
        at += length
    want, windows = conv_recurrence(x, weight, bias)
    torch.testing.assert_close(torch.cat(outputs), want)
    assert torch.equal(pool[2], windows[-1])


def test_a_slot_that_is_read_and_written_is_read_first():
    gen = generator()
    x, (weight, bias) = draw(gen, 4, DIM), filters(gen)
    pool = poisoned(3, 3, DIM, but=[1, 2])
    before = pool.clone()
    out = causal_conv1d_prefill(
        x,
        weight,
        bias,
        query_start_loc=ints([0, 2, 4]),
        conv_state=pool,
        read_slots=ints([1, 2]),
        has_initial_states=bools([True, True]),
        write_rows=ints([0, 1]),
        write_ends=ints([2, 4]),
        write_slots=ints([2, 1]),
    )
    for row in range(2):
        part = slice(2 * row, 2 * row + 2)
        want, windows = conv_recurrence(x[part], weight, bias, before[1 + row])
        torch.testing.assert_close(out[part], want)
        assert torch.equal(pool[2 - row], windows[-1])


@pytest.mark.parametrize("conv_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_prefill_then_updates_in_16_and_32_bits(dtype, conv_dtype):
    gen = generator()
    x = draw(gen, 8, DIM, dtype=dtype)
    weight, bias = filters(gen, dtype=dtype)
    pool = poisoned(3, 3, DIM, dtype=conv_dtype)
    first = causal_conv1d_prefill(
        x[:5],
        weight,
        bias,
        query_start_loc=ints([0, 5]),
        conv_state=pool,
        read_slots=ints([0]),
        has_initial_states=bools([False]),
        write_rows=ints([0]),
        write_ends=ints([5]),
        write_slots=ints([1]),
    )
    outputs = [first]
    for token in range(5, 8):
        slots = {"read_slots": ints([1]), "write_slots": ints([1])}
        outputs.append(
            causal_conv1d_update(x[token : token + 1], weight, bias, conv_state=pool, **slots)
        )
    got = torch.cat(outputs)
    assert got.dtype == dtype
    want, _ = conv_recurrence(x.double(), weight.double(), bias.double())
    narrow = {dtype, conv_dtype} - {torch.float32}
    bound = max([torch.finfo(d).eps for d in narrow], default=2e-6)
    assert (got.double() - want).norm() <= 2 * bound * want.norm()


@pytest.mark.parametrize("width", [2, 4])
def test_update_equals_the_recurrence_and_leaves_padding_alone(width):
    gen = generator()
    x = draw(gen, 4, DIM + 1)[:, 1:]
    x[1] = NAN
    weight, bias = filters(gen, width)
    pool = poisoned(6, width - 1, DIM, but=[1, 2])
    before = pool.clone()
    out = causal_conv1d_update(
        x,
        weight,
        bias,
        conv_state=pool,
        read_slots=ints([1, 0, 2, 3]),
        write_slots=ints([4, 0, 2, 0]),
    )
    for row, read, write in ((0, 1, 4), (2, 2, 2)):
        want, windows = conv_recurrence(x[row : row + 1], weight, bias, before[read])
        torch.testing.assert_close(out[row], want[0])
        assert torch.equal(pool[write], windows[0])
    assert not out[[1, 3]].any()
    assert_untouched(pool, before, [4, 2])


def test_update_of_padding_rows_alone_gives_zero():
    pool = poisoned(2, 3, DIM)
    slots = {"read_slots": ints([0, 0]), "write_slots": ints([0, 0])}
    x = torch.full((2, DIM), NAN, dtype=torch.float64)
    out = causal_conv1d_update(x, *filters(generator()), conv_state=pool, **slots)
    assert torch.equal(out, torch.zeros_like(x))
    assert pool.isnan().all()


def test_a_short_step_past_a_border_writes_its_own_slot():
    """Two tokens, fewer than the window, behind a slot that others share."""
    gen = generator()
    x, (weight, bias) = draw(gen, 2, DIM), filters(gen)
    pool = poisoned(4, 3, DIM, but=[1])
    shared = pool[1].clone()
    read, write = ints([1]), ints([3])
    outputs = []
    for token in range(2):
        outputs.append(
            causal_conv1d_update(
                x[token : token + 1],
                weight,
                bias,
                conv_state=pool,
                read_slots=read,
                write_slots=write,
            )
        )
        read = write
    want, windows = conv_recurrence(x, weight, bias, shared)
    torch.testing.assert_close(torch.cat(outputs), want)
    assert torch.equal(pool[1], shared)
    assert torch.equal(pool[3], windows[-1])


def test_drafts_keep_a_window_for_every_token_and_padding_tokens_give_zero():
    gen = generator()
    x, (weight, bias) = draw(gen, 7, DIM), filters(gen)
    x[5:] = NAN
    pool = poisoned(10, 3, DIM, but=[7, 8, 9])
    before = pool.clone()
    out = causal_conv1d_update(
        x,
        weight,
        bias,
        conv_state=pool,
        read_slots=ints([7, 8, 9, 0]),
        write_slots=torch.stack(
            [ints(row) for row in ([1, 2, 3], [4, 0, 0], [5, 0, 0], [0, 0, 0])]
        ),
        query_start_loc=ints([0, 3, 4, 5, 5]),
    )
    for start, read, writes in ((0, 7, [1, 2, 3]), (3, 8, [4]), (4, 9, [5])):
        part = slice(start, start + len(writes))
        want, windows = conv_recurrence(x[part], weight, bias, before[read])
        torch.testing.assert_close(out[part], want)
        for slot, window in zip(writes, windows, strict=True):
            assert torch.equal(pool[slot], window)
    assert not out[5:].any()
    assert_untouched(pool, before, [1, 2, 3, 4, 5])


def test_activation_is_silu_or_none():
    gen = generator()
    x, (weight, bias) = draw(gen, 1, DIM), filters(gen)
    pool = poisoned(2, 3, DIM, but=[1])
    slots = {"read_slots": ints([1]), "write_slots": ints([1])}
    plain = causal_conv1d_update(x, weight, bias, conv_state=pool.clone(), activation=None, **slots)
    silu = causal_conv1d_update(x, weight, bias, conv_state=pool.clone(), **slots)
    torch.testing.assert_close(silu, plain * torch.sigmoid(plain))
    with pytest.raises(ValueError, match=r'activation: \'gelu\'; wanted "silu" or None'):
        causal_conv1d_update(x, weight, bias, conv_state=pool, activation="gelu", **slots)
