"""Scheduling, slots and prefix cache against states that say what they are of; no model."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from symbolic_engine import SymbolicEngine, next_token

MODES = [
    {"cache": "none"},
    {"cache": "align", "block_size": 1},
    {"cache": "align", "block_size": 4},
    {"cache": "align", "block_size": 5},
    {"cache": "all", "block_size": 1, "chunk_size": 1},
    {"cache": "all", "block_size": 4},
    {"cache": "all", "block_size": 8},
]
DECODES = [
    {"decode": "baseline"},
    {"decode": "replay-torch", "buffer_len": 1},
    {"decode": "replay-torch", "buffer_len": 3},
    {"decode": "replay-torch", "buffer_len": 16},
]


def continued(prompt: list[int], total: int) -> list[int]:
    """The prompt and what the symbolic model generates after it."""
    tokens = list(prompt)
    while len(tokens) < total:
        tokens.append(next_token(tokens))
    return tokens


def engine_of(num_slots: int = 64, **options) -> SymbolicEngine:
    return SymbolicEngine(
        num_slots, **{"max_num_seqs": 4, "max_model_len": 48, "block_size": 4, **options}
    )


@settings(max_examples=150, deadline=None)
@given(
    mode=st.sampled_from(MODES),
    decode=st.sampled_from(DECODES),
    budget=st.integers(5, 40),
    seqs=st.integers(1, 5),
    spare=st.integers(0, 12),
    ops=st.lists(
        st.one_of(
            st.tuples(
                st.just("add"),
                st.lists(st.integers(0, 1), min_size=1, max_size=30),
                st.integers(1, 20),
            ),
            st.tuples(st.just("step"), st.integers(1, 6)),
            st.tuples(st.just("cancel"), st.integers(0, 20)),
        ),
        max_size=25,
    ),
)
def test_any_schedule_reads_only_states_of_its_own_tokens(mode, decode, budget, seqs, spare, ops):
    block = mode.get("block_size", 0)
    most = {"none": 1, "align": 3, "all": -(-min(budget, 48) // (block or 1)) + 2}[mode["cache"]]
    engine = engine_of(
        1 + most + spare, **mode, **decode, max_num_batched_tokens=budget, max_num_seqs=seqs
    )
    cancelled = set()
    for op in ops:
        if op[0] == "add":
            engine.add(op[1], op[2])
        elif op[0] == "cancel" and op[1] < len(engine.requests):
            request = engine.requests[op[1]]
            if request.number not in engine.finished and request.number not in cancelled:
                engine.scheduler.remove(request)
                cancelled.add(request.number)
                engine.check()
        elif op[0] == "step":
            for _ in range(op[1]):
                engine.step()
    engine.run()
    assert engine.scheduler.pool.num_used == 0
    for request in engine.requests:
        if request.number not in cancelled:
            prompt = request.tokens[: request.num_prompt_tokens]
            assert engine.finished[request.number] == continued(prompt, request.limit)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("decode", DECODES)
@pytest.mark.parametrize("length", [1, 2, 3, 4, 5, 7, 8, 9, 16, 46, 47])
def test_every_prompt_length_runs_to_the_end_of_the_model(mode, decode, length):
    engine = engine_of(**mode, **decode)
    engine.add([1] * length, 100)
    engine.run()
    assert engine.finished[0] == continued([1] * length, 48)


@pytest.mark.parametrize("mode", [mode for mode in MODES if mode["cache"] != "align"])
def test_a_budget_of_one_token_serves_requests_one_after_the_other(mode):
    engine = engine_of(**mode, max_num_batched_tokens=1)
    for number in range(3):
        engine.add([number] * 7, 4)
    engine.run()
    assert list(engine.finished) == [0, 1, 2]


def test_first_come_first_served():
    engine = engine_of(cache="none", max_num_seqs=2)
    for _ in range(5):
        engine.add([1, 2, 3], 4)
    engine.run()
    assert list(engine.finished) == [0, 1, 2, 3, 4]


def test_decodes_go_before_prefills_and_prefills_are_chunked():
    engine = engine_of(cache="none", max_num_batched_tokens=10)
    engine.add([1, 2], 20)
    engine.step()
    engine.add([1] * 25, 3)
    steps = [engine.step().query_lens.tolist() for _ in range(3)]
    assert steps == [[1, 9], [1, 9], [1, 7]]


def test_the_request_that_arrived_last_makes_room_and_resumes_first():
    engine = engine_of(6, cache="align", block_size=4)
    for number in range(3):
        engine.add([number] * 3, 20)
    waiting = engine.add([3] * 3, 20)
    while not engine.scheduler.preemptions:
        engine.step()
    victim = max((r for r in engine.requests if r.preemptions), key=lambda r: r.number)
    running = [request.number for request in engine.scheduler.running]
    assert all(number < victim.number for number in running)
    engine.run()
    assert next(iter(engine.finished)) == 0
    assert engine.finished.keys() == {0, 1, 2, waiting.number}


def test_a_resumed_request_is_anchored_where_its_prefill_ends():
    engine = engine_of(cache="none", decode="replay-torch", buffer_len=16)
    request = engine.add([1] * 20, 20)
    while len(request.tokens) < 30:
        engine.step()
    engine.scheduler._preempt_last()
    engine.step()
    scheduled = engine.step()
    assert scheduled.step.decode_base.tolist() == [30]
    engine.run()


@pytest.mark.parametrize("mode", MODES[1:])
def test_a_prefix_is_not_found_before_the_step_that_computes_it_has_run(mode):
    engine = engine_of(**mode)
    prompt = [1, 0, 1, 1, 0] * 4
    engine.add(prompt, 1)
    scheduled = engine.scheduler.schedule()
    pool = engine.scheduler.pool
    assert not pool._slot_of
    engine._run(scheduled, plan := engine.pipeline.plan(scheduled.step))
    engine.scheduler.finish_step(scheduled, plan)
    assert pool._slot_of


@pytest.mark.parametrize("mode", MODES[1:])
def test_a_hit_leaves_a_token_to_run(mode):
    engine = engine_of(**mode)
    prompt = [1, 0, 1, 1, 0] * 4
    engine.add(prompt, 1)
    engine.run()
    spent = engine.scheduled_tokens
    again = engine.add(prompt, 1)
    engine.run()
    size = mode["block_size"]
    assert again.cached_tokens == (len(prompt) - 1) // size * size
    assert engine.scheduled_tokens - spent == len(prompt) - again.cached_tokens


@pytest.mark.parametrize("mode", MODES[1:])
@pytest.mark.parametrize("budget", [12, 40])
def test_requests_that_arrive_together_compute_a_shared_prefix_once(mode, budget):
    size = mode["block_size"]
    engine = engine_of(**mode, max_num_batched_tokens=budget)
    shared = [1, 0, 1, 1, 0] * 8
    for _ in range(4):
        engine.add(shared, 1)
    engine.run()
    hit = 39 // size * size
    assert engine.scheduled_tokens == 40 + 3 * (40 - hit)


def test_a_request_that_waits_for_a_prefix_does_not_hold_up_the_others():
    engine = engine_of(cache="align", block_size=4)
    for prompt in ([1] * 9, [1] * 9, [2] * 9):
        engine.add(prompt, 4)
    first = engine.step()
    assert [request.number for request in first.requests] == [0, 2]
    assert [request.number for request in engine.scheduler.waiting] == [1]
    engine.step()
    assert engine.requests[1].cached_tokens == 8
    engine.run()


def test_nobody_is_admitted_in_a_step_that_took_a_row_away():
    engine = engine_of(6, cache="align", block_size=4)
    for number in range(4):
        engine.add([number] * 3, 20)
    while engine.scheduler.waiting or engine.scheduler.running:
        before = engine.scheduler.preemptions
        rows = {request.number for request in engine.scheduler.running}
        scheduled = engine.step()
        if engine.scheduler.preemptions > before:
            assert {request.number for request in scheduled.requests} <= rows
    assert engine.scheduler.preemptions


@pytest.mark.parametrize("mode", MODES)
def test_a_step_that_was_broken_off_is_computed_again(mode):
    engine = engine_of(**mode, decode="replay-torch", buffer_len=3)
    for number in range(6):
        engine.add([number, 1, 0] * 3, 10)
    for nth in range(60):
        if nth % 4 == 3:
            scheduled = engine.scheduler.schedule()
            if scheduled is not None:
                engine._forget_freed()
                for slot in scheduled.step.block_table.reshape(-1).tolist():
                    if slot and slot not in engine.scheduler.pool._hash_of:
                        engine.state[slot] = engine.conv[slot] = (99,)
            engine.scheduler.restart()
            assert [request.number for request in engine.scheduler.waiting] == sorted(
                request.number for request in engine.scheduler.waiting
            )
            engine.check()
        engine.step()
    engine.run()
    for request in engine.requests:
        assert engine.finished[request.number] == continued([request.number, 1, 0] * 3, 19)
