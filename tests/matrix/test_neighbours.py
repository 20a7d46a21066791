"""A request gives the same tokens alone, among six others, in any order and any chunks."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ssmcore.engine.requests import SamplingParams
from ssmcore.testing.runs import TEXT, assert_idle, greedy

COUNT = 32


@pytest.fixture(scope="module")
def prompts(bench):
    """Seven prompts: around the convolution's window and around a chunk."""
    text, chunk = bench.tokenizer.encode(TEXT), bench.chunk_size
    lengths = (1, 2, 3, 4, chunk - 1, chunk + 1, 2 * chunk + 2)
    return [tuple(text[50 * nth : 50 * nth + length]) for nth, length in enumerate(lengths)]


@pytest.fixture(scope="module")
def alone(bench, prompts):
    """What the plain recurrence gives each prompt by itself."""
    return [bench.reference([prompt], [COUNT])[0] for prompt in prompts]


@pytest.fixture(scope="module")
def engines(bench):
    """A case for every pair of a cache mode and a decode algorithm that goes together here."""
    cases = {}
    for case in bench.matrix.cases():
        plain = (case.state_dtype, case.drafts, case.pool, case.prefix) == (
            "float32", 0, "ample", "fresh",
        )  # fmt: skip
        sized = case.budget == 300 and all(
            value == 7 or value % 64 == 0
            for choice in (case.cache, case.decode)
            for _, value in choice.options
        )
        if plain and sized and bench.matrix.refusal(case) is None:
            exact = bench.matrix.selection(case).decode.exact
            if exact:
                cases.setdefault((case.cache.name, case.decode.name), case)
    return list(cases.values())


def tokens(bench, case, prompts):
    with bench.engine(case.settings(bench.device)) as engine:
        outputs = greedy(engine, prompts, [COUNT] * len(prompts))
        assert_idle(engine.stats())
    return [output.token_ids for output in outputs]


def test_alone_and_in_a_batch_of_seven(bench, engines, prompts, alone):
    assert len(engines) >= 2
    for case in engines:
        assert tokens(bench, case, prompts) == alone, str(case)
        assert tokens(bench, case, prompts[5:6]) == alone[5:6], str(case)


def test_any_order_of_arrival_while_others_run(bench, engines, prompts, alone):
    for case in engines:
        assert staggered(bench, case, prompts[::-1]) == alone[::-1], str(case)


def staggered(bench, case, prompts):
    """Each prompt joins a few steps after the one before it."""
    found = {}

    def collect(events):
        found.update({event.request_id: event.output for event in events if event.output})

    with bench.engine(case.settings(bench.device)) as engine:
        params = SamplingParams(max_tokens=COUNT, ignore_eos=True)
        names = []
        for nth, prompt in enumerate(prompts):
            names.append(engine.add_request(list(prompt), params))
            for _ in range(nth):
                collect(engine.step())
        while engine.has_work:
            collect(engine.step())
        assert_idle(engine.stats())
    return [found[name].token_ids for name in names]


@pytest.mark.parametrize("budget", [1, 17])
def test_chunks_of_any_size(bench, engines, prompts, alone, budget):
    for case in engines:
        chunked = replace(case, budget=budget)
        if bench.matrix.refusal(chunked) is None:
            assert tokens(bench, chunked, prompts[3:5]) == alone[3:5], str(chunked)
