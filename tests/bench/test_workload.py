from __future__ import annotations

from pathlib import Path

import pytest

from ssmcore.bench.workload import PromptMaker, make_workload
from ssmcore.errors import SettingsError
from ssmcore.traces import Trace, TraceRequest, read_trace

DATA = Path(__file__).parent.parent / "data"


def chat(*lengths: tuple[int, int]) -> Trace:
    requests = (TraceRequest(at, float(at), *pair) for at, pair in enumerate(lengths))
    return Trace("made up", "azure", tuple(requests))


def lengths_of(workload) -> list[tuple[int, int]]:
    return [(item.prompt_tokens, item.output_tokens) for item in workload.items]


def test_lengths_that_fit_are_kept():
    workload = make_workload(chat((60, 4), (1, 1)), max_model_len=64)
    assert lengths_of(workload) == [(60, 4), (1, 1)]
    assert (workload.prompts_capped, workload.outputs_capped) == (0, 0)


def test_the_prompt_gives_way_to_the_output_and_both_are_counted():
    workload = make_workload(chat((61, 4), (500, 500), (3, 63)), max_model_len=64)
    assert lengths_of(workload) == [(60, 4), (1, 63), (1, 63)]
    assert (workload.prompts_capped, workload.outputs_capped) == (3, 1)


def test_caps_of_ones_own_hold_too():
    workload = make_workload(chat((61, 40)), max_model_len=64, max_prompt=8, max_output=2)
    assert lengths_of(workload) == [(8, 2)]


def test_requests_without_tokens_are_left_out_and_time_starts_with_the_first_kept():
    workload = make_workload(chat((0, 4), (5, 5), (5, 0)), max_model_len=64)
    assert lengths_of(workload) == [(5, 5)]
    assert workload.left_out == 2
    assert workload.items[0].arrival == 0


@pytest.mark.parametrize(
    ("caps", "message"),
    [
        ({"max_prompt": 0}, "--max-prompt = 0"),
        ({"max_output": -1}, "--max-output = -1"),
        ({"max_model_len": 1}, "engine.max_model_len = 1"),
    ],
)
def test_caps_that_leave_nothing_are_refused(caps, message):
    with pytest.raises(SettingsError, match=message):
        make_workload(chat((5, 5)), **{"max_model_len": 64} | caps)


def test_a_trace_with_nothing_to_send_is_refused():
    with pytest.raises(SettingsError, match="no request with prompt and output"):
        make_workload(chat((0, 5)), max_model_len=64)


def test_equal_hash_ids_make_equal_prefixes_and_others_do_not():
    trace = read_trace(DATA / "shared_small.jsonl")
    workload = make_workload(trace, max_model_len=4096)
    maker = PromptMaker(256, seed=3)
    first, second, third = (maker.tokens(item) for item in workload.items[:3])
    assert [len(prompt) for prompt in (first, second, third)] == [700, 1024, 1100]
    assert first[:512] == second[:512] == third[:512]
    assert first[512:700] == third[512:700]
    assert first[512:700] != second[512:700]


def test_prompts_are_a_function_of_the_seed():
    item = make_workload(chat((200, 1)), max_model_len=4096).items[0]
    prompt = PromptMaker(50, seed=1).tokens(item)
    assert prompt == PromptMaker(50, seed=1).tokens(item)
    assert prompt != PromptMaker(50, seed=2).tokens(item)
    assert set(prompt) <= set(range(50))


def test_a_capped_prompt_keeps_its_beginning():
    trace = read_trace(DATA / "shared_small.jsonl")
    whole = make_workload(trace, max_model_len=4096).items[1]
    short = make_workload(trace, max_model_len=4096, max_prompt=600).items[1]
    maker = PromptMaker(256)
    assert maker.tokens(short) == maker.tokens(whole)[:600]
