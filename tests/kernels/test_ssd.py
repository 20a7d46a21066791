"""The chunked recurrence of prefills against its token-by-token form in float64."""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from kernel_builders import (
    NAN,
    NO_LIMIT,
    SHAPES,
    MixerInputs,
    assert_untouched,
    bools,
    chunk_metadata,
    draw,
    generator,
    ints,
    offsets,
    poisoned,
)
from ssmcore_kernels.reference import ssd as module
from ssmcore_kernels.reference.recurrence import ssd_recurrence
from ssmcore_kernels.reference.ssd import ssd_chunk_scan, ssd_prefill
from ssmcore_kernels.reference.state_update import selective_state_update

pytestmark = pytest.mark.usefixtures("form")
FIXTURES = [HealthCheck.function_scoped_fixture]


def check_scan(shape, lengths, computed, size, with_initial=True, dt_limit=NO_LIMIT):
    gen = generator()
    loc = offsets(lengths)
    inputs = MixerInputs(gen, loc[-1], shape, dt_limit=dt_limit)
    chunks, _ = chunk_metadata(lengths, computed, size)
    initial = draw(gen, len(lengths), *shape[:3]) if with_initial else None
    y, states = inputs.run(ssd_chunk_scan, **chunks, initial_states=initial)
    assert y.dtype == states.dtype == torch.float64
    for row in range(len(lengths)):
        part = slice(loc[row], loc[row + 1])
        want_y, want = inputs.oracle(part, None if initial is None else initial[row])
        torch.testing.assert_close(y[part], want_y, rtol=1e-9, atol=1e-9)
        for chunk in (chunks["seq_idx"] == row).nonzero().flatten().tolist():
            last = int(chunks["cu_chunk_seqlens"][chunk + 1]) - loc[row] - 1
            torch.testing.assert_close(states[chunk], want[last], rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("lengths", [[1], [2, 3, 1], [7, 8, 9], [1, 15, 16, 17]])
@pytest.mark.parametrize("size", [1, 4, 16])
def test_scan_equals_the_recurrence(shape, lengths, size):
    computed = [3 * row for row in range(len(lengths))]
    check_scan(shape, lengths, computed, size, dt_limit=(0.05, 2.0))


@pytest.mark.parametrize("lengths", [[63], [64], [65], [130, 1, 64]])
def test_chunks_longer_than_a_span(lengths):
    check_scan((2, 4, 5, 1), lengths, [0] * len(lengths), 256)


def test_many_chunks_of_many_rows():
    lengths = [33, 1, 20, 64, 7]
    check_scan((2, 3, 4, 2), lengths, [5, 0, 3, 0, 1], 4, with_initial=False)


rows = st.lists(st.tuples(st.integers(1, 12), st.integers(0, 9)), min_size=1, max_size=5)


@settings(max_examples=25, deadline=None, suppress_health_check=FIXTURES)
@given(rows, st.sampled_from([1, 2, 3, 5, 8]), st.booleans(), st.sampled_from([2, 3, 64]))
def test_any_rows_in_any_chunks_equal_the_recurrence(rows, size, with_initial, span):
    lengths, computed = zip(*rows, strict=True)
    kept, module.SPAN_TOKENS = module.SPAN_TOKENS, span
    try:
        check_scan((2, 3, 4, 2), lengths, computed, size, with_initial)
    finally:
        module.SPAN_TOKENS = kept


@pytest.mark.parametrize("given_length", [True, False])
def test_prefill_reads_and_writes_only_the_slots_it_is_given(given_length):
    shape, lengths = (4, 8, 16, 2), [5, 9, 2]
    inputs = MixerInputs(generator(), sum(lengths), shape)
    chunks, last = chunk_metadata(lengths, [3, 0, 7], 4)
    pool = poisoned(9, *shape[:3], but=[2, 5])
    before = pool.clone()
    y = inputs.run(
        ssd_prefill,
        **chunks,
        state=pool,
        read_slots=ints([2, 8, 5]),
        has_initial_states=bools([True, False, True]),
        write_chunks=ints([last[0], 3, last[1], last[2]]),
        write_slots=ints([3, 6, 7, 5]),
        max_chunk_len=4 if given_length else None,
    )
    loc = offsets(lengths)
    for row, initial, slot in ((0, before[2], 3), (1, None, 7), (2, before[5], 5)):
        part = slice(loc[row], loc[row + 1])
        want, states = inputs.oracle(part, initial)
        torch.testing.assert_close(y[part], want)
        torch.testing.assert_close(pool[slot], states[-1])
        if row == 1:
            torch.testing.assert_close(pool[6], states[7])  # behind the row's second chunk
    assert_untouched(pool, before, [3, 6, 7, 5])


@pytest.mark.parametrize("split", [(1,) * 23, (23,), (3, 20), (7, 1, 8, 7)])
def test_any_split_of_a_prompt_gives_the_same_state(split):
    shape = (4, 8, 16, 1)
    inputs = MixerInputs(generator(), 23, shape)
    pool = poisoned(2, *shape[:3])
    outputs, at = [], 0
    for length in split:
        chunks, last = chunk_metadata([length], [at], 4)
        outputs.append(
            inputs.run(
                ssd_prefill,
                slice(at, at + length),
                **chunks,
                state=pool,
                read_slots=ints([1]),
                has_initial_states=bools([at > 0]),
                write_chunks=ints(last),
                write_slots=ints([1]),
            )
        )
        at += length
    want, states = inputs.oracle()
    torch.testing.assert_close(torch.cat(outputs), want)
    torch.testing.assert_close(pool[1], states[-1])


@pytest.mark.parametrize(
    ("dtype", "state_dtype", "bound"),
    [
        (torch.float32, torch.float32, 1e-5),
        (torch.float32, torch.bfloat16, 1e-2),
        (torch.float32, torch.float16, 2e-3),
        (torch.bfloat16, torch.float32, 1e-2),
        (torch.float16, torch.float32, 2e-3),
    ],
)
def test_rounding_is_bounded_and_only_where_something_is_stored(dtype, state_dtype, bound):
    shape = (4, 8, 16, 2)
    inputs = MixerInputs(generator(), 100, shape, dtype)
    chunks, last = chunk_metadata([100], [0], 32)
    pool = poisoned(3, *shape[:3], dtype=state_dtype)
    y = inputs.run(
        ssd_prefill,
        **chunks,
        state=pool,
        read_slots=ints([0]),
        has_initial_states=bools([False]),
        write_chunks=ints(last),
        write_slots=ints([2]),
    )
    assert y.dtype == dtype
    want, states = inputs.oracle()
    y_bound = 1e-5 if dtype == torch.float32 else bound
    assert (y.double() - want).norm() <= y_bound * want.norm()
    s_bound = 1e-5 if state_dtype == torch.float32 else bound
    assert (pool[2].double() - states[-1]).norm() <= s_bound * states[-1].norm()


def test_pages_with_padding_and_their_gaps():
    shape = (4, 8, 16, 2)
    inputs = MixerInputs(generator(), 9, shape)
    pages = torch.zeros(3, 5, 8 + 3, 16 + 5, dtype=torch.float64)
    view = pages[:, :4, :8, :16]
    chunks, last = chunk_metadata([9], [0], 4)
    inputs.run(
        ssd_prefill,
        **chunks,
        state=view,
        read_slots=ints([1]),
        has_initial_states=bools([True]),
        write_chunks=ints(last),
        write_slots=ints([2]),
    )
    torch.testing.assert_close(view[2], inputs.oracle()[1][-1])
    assert int((pages != 0).sum()) == view[2].numel()


def test_extreme_inputs_give_no_nan_and_no_infinity():
    tokens, shape = 4096, (2, 4, 8, 1)
    inputs = MixerInputs(generator(), tokens, shape, torch.float32)
    inputs.A = torch.tensor([-1e-4, -50.0])
    inputs.dt = torch.linspace(-30, 30, tokens)[:, None].expand(tokens, 2)
    y, states = inputs.run(ssd_chunk_scan, cu_chunk_seqlens=ints([0, tokens]), seq_idx=ints([0]))
    assert y.isfinite().all()
    assert states.isfinite().all()
    # most tokens are forgotten by the end: the last few say what must come
    tail = slice(tokens - 64, tokens)
    x, dt, B, C = (t[tail].double() for t in (inputs.x, inputs.dt, inputs.B, inputs.C))
    rest = {name: inputs.rest[name].double() for name in ("D", "dt_bias")}
    want, _ = ssd_recurrence(x, dt, inputs.A.double(), B, C, **rest)
    torch.testing.assert_close(y[-1, 1].double(), want[-1, 1], rtol=1e-4, atol=1e-4)
    state = torch.zeros(2, *shape[:3])
    for token in (0, tokens - 1):
        part = slice(token, token + 1)
        slots = {"read_slots": ints([1]), "write_slots": ints([1])}
        assert inputs.run(selective_state_update, part, state=state, **slots).isfinite().all()


@pytest.mark.parametrize("rate", [-1e-3, -0.3, -2.0, -20.0])
def test_strong_and_weak_decays_in_float32(rate):
    """Decays too small for a normal number count as zero without a trace in the results."""
    inputs = MixerInputs(generator(), 200, (4, 4, 8, 1), torch.float32)
    inputs.A = torch.full((4,), rate)
    y, states = inputs.run(ssd_chunk_scan, cu_chunk_seqlens=ints([0, 200]), seq_idx=ints([0]))
    want, want_states = inputs.oracle()
    assert (y.double() - want).norm() <= 1e-5 * want.norm()
    assert (states[0].double() - want_states[-1]).norm() <= 1e-5 * want_states[-1].norm()


def test_one_row_of_infinities_stays_alone():
    lengths = [9, 9, 9]
    inputs = MixerInputs(generator(), 27, (2, 3, 4, 1))
    chunks, _ = chunk_metadata(lengths, [0] * 3, 4)
    want, want_states = inputs.run(ssd_chunk_scan, **chunks)
    inputs.x[9:18] = NAN
    y, states = inputs.run(ssd_chunk_scan, **chunks)
    others = [*range(9), *range(18, 27)]
    assert torch.equal(y[others], want[others])
    assert torch.equal(states[[0, 1, 2, 6, 7, 8]], want_states[[0, 1, 2, 6, 7, 8]])


def test_results_of_a_row_do_not_depend_on_its_neighbours():
    inputs = MixerInputs(generator(), 30, (2, 3, 4, 1), torch.float32)
    chunks, _ = chunk_metadata([10, 20], [0, 0], 4)
    y, states = inputs.run(ssd_chunk_scan, **chunks, max_chunk_len=4)
    alone, _ = chunk_metadata([20], [0], 4)
    want, want_states = inputs.run(ssd_chunk_scan, slice(10, 30), **alone, max_chunk_len=4)
    torch.testing.assert_close(y[10:], want, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(states[3:], want_states, rtol=1e-6, atol=1e-6)


def test_gradients_equal_those_of_the_recurrence():
    gen = generator()
    shape = (2, 3, 4, 1)
    inputs = MixerInputs(gen, 7, shape)
    initial = draw(gen, 1, *shape[:3]).requires_grad_()
    leaves = [t.clone().requires_grad_() for t in (inputs.x, inputs.dt, inputs.B, inputs.C)]
    inputs.x, inputs.dt, inputs.B, inputs.C = leaves
    inputs.A = inputs.A.requires_grad_()
    leaves = [*leaves, inputs.A, initial]
    chunks, _ = chunk_metadata([7], [2], 4)
    y, states = inputs.run(ssd_chunk_scan, **chunks, initial_states=initial)
    got = torch.autograd.grad(y.square().sum() + states[-1].sin().sum(), leaves)
    want_y, want_states = inputs.oracle(state=initial[0])
    want = torch.autograd.grad(want_y.square().sum() + want_states[-1].sin().sum(), leaves)
    for one, other in zip(got, want, strict=True):
        torch.testing.assert_close(one, other)


def test_chunks_that_do_not_cover_the_tokens_are_refused(form):
    if form == "device":
        pytest.skip("offsets are read on a CPU only")
    inputs = MixerInputs(generator(), 5, (2, 3, 4, 1))
    with pytest.raises(ValueError, match="cu_chunk_seqlens: from 0 to 4; wanted 0 to the 5 tokens"):
        inputs.run(ssd_chunk_scan, cu_chunk_seqlens=ints([0, 4]), seq_idx=ints([0]))
