"""One step of the recurrence against its token-by-token form in float64."""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from kernel_builders import (
    NAN,
    SHAPES,
    MixerInputs,
    assert_untouched,
    draw,
    generator,
    ints,
    offsets,
    poisoned,
)
from ssmcore_kernels.reference.state_update import selective_state_update

pytestmark = pytest.mark.usefixtures("form")
FIXTURES = [HealthCheck.function_scoped_fixture]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(
    ("dtype", "state_dtype", "bound"),
    [
        (torch.float64, torch.float64, 1e-12),
        (torch.float32, torch.float32, 2e-6),
        (torch.float32, torch.bfloat16, 1e-2),
        (torch.float32, torch.float16, 2e-3),
        (torch.bfloat16, torch.float32, 1e-2),
        (torch.float16, torch.float32, 2e-3),
        (torch.bfloat16, torch.bfloat16, 1e-2),
    ],
)
def test_a_step_equals_the_recurrence(shape, dtype, state_dtype, bound):
    inputs = MixerInputs(generator(), 4, shape, dtype, dt_limit=(0.1, 3.0))
    inputs.x[1] = NAN
    pool = poisoned(6, *shape[:3], dtype=state_dtype, but=[1, 2])
    before = pool.clone()
    y = inputs.run(
        selective_state_update,
        state=pool,
        read_slots=ints([1, 0, 2, 3]),
        write_slots=ints([4, 0, 2, 0]),
    )
    assert y.dtype == dtype
    assert not y[[1, 3]].any()
    for row, read, write in ((0, 1, 4), (2, 2, 2)):
        want, states = inputs.oracle(slice(row, row + 1), before[read])
        assert (y[row].double() - want[0]).norm() <= bound * want.norm()
        assert (pool[write].double() - states[0]).norm() <= bound * states[0].norm()
    assert_untouched(pool, before, [4, 2])


@settings(max_examples=30, deadline=None, suppress_health_check=FIXTURES)
@given(st.data())
def test_any_choice_of_slots(data):
    shape = (4, 3, 5, 2)
    pages = data.draw(st.permutations(range(1, 9)))
    rows = data.draw(st.integers(1, 6))
    writes = [data.draw(st.sampled_from([0, pages[row]])) for row in range(rows)]
    reads = [
        data.draw(st.sampled_from([write, pages[6], pages[7]])) if write else 0 for write in writes
    ]
    inputs = MixerInputs(generator(), rows, shape)
    pool = poisoned(9, *shape[:3], but={*reads} - {0})
    before = pool.clone()
    y = inputs.run(
        selective_state_update, state=pool, read_slots=ints(reads), write_slots=ints(writes)
    )
    for row, (read, write) in enumerate(zip(reads, writes, strict=True)):
        if write:
            want, states = inputs.oracle(slice(row, row + 1), before[read])
            torch.testing.assert_close(y[row], want[0])
            torch.testing.assert_close(pool[write], states[0])
        else:
            assert not y[row].any()
    assert_untouched(pool, before, [write for write in writes if write])


def test_results_go_where_out_says():
    shape = (4, 8, 16, 2)
    inputs = MixerInputs(generator(), 2, shape)
    slots = {"read_slots": ints([1, 2]), "write_slots": ints([1, 2])}
    pool = poisoned(3, *shape[:3], but=[1, 2])
    want = inputs.run(selective_state_update, state=pool.clone(), **slots)
    out = torch.full((2, 4, 9), NAN, dtype=torch.float64)[..., :8]
    got = inputs.run(selective_state_update, state=pool, out=out, **slots)
    assert got is out
    assert torch.equal(out, want)


def test_pages_with_padding_and_their_gaps():
    shape = (4, 8, 16, 2)
    inputs = MixerInputs(generator(), 2, shape)
    pages = torch.zeros(3, 4, 8 + 3, 16 + 5, dtype=torch.float64)
    plain = torch.zeros(3, 4, 8, 16, dtype=torch.float64)
    view = pages[:, :, :8, :16]
    slots = {"read_slots": ints([1, 2]), "write_slots": ints([1, 2])}
    for _ in range(2):
        want = inputs.run(selective_state_update, state=plain, **slots)
        torch.testing.assert_close(inputs.run(selective_state_update, state=view, **slots), want)
    torch.testing.assert_close(view, plain)
    assert int((pages != 0).sum()) == plain[1:].numel()


def test_slots_far_apart():
    """Offsets past 2^31 elements, in strides: pages that nothing touches take no memory."""
    stride = 2**30 + 7
    try:
        storage = torch.empty(2 * stride + 16, dtype=torch.bfloat16)
    except RuntimeError:
        pytest.skip("no address space for it")
    pool = storage.as_strided((3, 2, 2, 4), (stride, 8, 4, 1))
    before = draw(generator(), 2, 2, 4, dtype=torch.bfloat16)
    pool[0], pool[1] = 0.0, before
    inputs = MixerInputs(generator(), 1, (2, 2, 4, 1))
    inputs.run(selective_state_update, state=pool, read_slots=ints([1]), write_slots=ints([2]))
    want = inputs.oracle(state=before)[1][0]
    torch.testing.assert_close(pool[2].double(), want, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("accepted", [1, 2, 3])
def test_accepting_drafts_equals_decoding_them(accepted):
    """A second step that reads the state after the accepted tokens goes on as plain decoding."""
    shape = (4, 8, 16, 2)
    inputs = MixerInputs(generator(), 6, shape)
    pool = poisoned(8, *shape[:3], but=[7])
    first = pool[7].clone()
    kept = [1, 2, 3]
    loc, writes = ints([0, 3]), torch.stack([ints(kept)])
    y = inputs.run(
        selective_state_update,
        slice(0, 3),
        state=pool,
        read_slots=ints([7]),
        write_slots=writes,
        query_start_loc=loc,
    )
    then = inputs.run(
        selective_state_update,
        slice(3, 6),
        state=pool,
        read_slots=ints([kept[accepted - 1]]),
        write_slots=torch.stack([ints([4, 5, 6])]),
        query_start_loc=loc,
    )
    want, states = inputs.oracle(slice(0, 3), first)
    torch.testing.assert_close(y, want)
    for slot, state in zip(kept, states, strict=True):
        torch.testing.assert_close(pool[slot], state)
    want, states = inputs.oracle(slice(3, 6), states[accepted - 1])
    torch.testing.assert_close(then, want)
    torch.testing.assert_close(pool[6], states[-1])


def test_rows_without_drafts_and_padding_beside_rows_with_drafts():
    shape, lengths = (4, 8, 16, 2), [3, 1, 2, 0]
    inputs = MixerInputs(generator(), 8, shape)
    inputs.x[6:] = NAN  # tokens of a step padded to a graph's size
    inputs.dt[6:] = NAN
    reads, writes = [9, 10, 11, 0], [[1, 2, 3], [4, 7, 8], [5, 6, 7], [0, 0, 0]]
    pool = poisoned(12, *shape[:3], but=reads[:3])
    before = pool.clone()
    loc = offsets(lengths)
    y = inputs.run(
        selective_state_update,
        state=pool,
        read_slots=ints(reads),
        write_slots=torch.stack([ints(row) for row in writes]),
        query_start_loc=ints(loc),
    )
    for row in range(3):
        part = slice(loc[row], loc[row + 1])
        want, states = inputs.oracle(part, before[reads[row]])
        torch.testing.assert_close(y[part], want)
        for nth in range(lengths[row]):
            torch.testing.assert_close(pool[writes[row][nth]], states[nth])
    assert not y[6:].any()
    assert_untouched(pool, before, [1, 2, 3, 4, 5, 6])


def test_a_16_bit_state_is_rounded_only_when_stored():
    """Drafts of one step go on from the unrounded state."""
    shape = (2, 3, 4, 1)
    inputs = MixerInputs(generator(), 3, shape, torch.float32)
    pool = poisoned(5, *shape[:3], dtype=torch.bfloat16, but=[4])
    first = pool[4].clone()
    y = inputs.run(
        selective_state_update,
        state=pool,
        read_slots=ints([4]),
        write_slots=torch.stack([ints([1, 2, 3])]),
        query_start_loc=ints([0, 3]),
    )
    want, states = inputs.oracle(state=first)
    assert (y.double() - want).norm() <= 1e-6 * want.norm()
    assert torch.equal(pool[3], states[-1].float().bfloat16())


def test_five_runs_give_the_same_bits():
    shape = (4, 8, 16, 2)
    inputs = MixerInputs(generator(), 100, shape, torch.float32)
    start = draw(generator(), 101, *shape[:3], dtype=torch.float32)
    slots = ints(range(1, 101))
    runs = []
    for _ in range(5):
        pool = start.clone()
        y = inputs.run(selective_state_update, state=pool, read_slots=slots, write_slots=slots)
        runs.append((y, pool))
    for y, pool in runs[1:]:
        assert torch.equal(y, runs[0][0])
        assert torch.equal(pool, runs[0][1])
