"""Drafting and verification: the same tokens, greedy and sampled, in fewer steps."""

from __future__ import annotations

import pytest
from engine_builders import (
    SLOT_BYTES,
    TEXT,
    assert_idle,
    greedy,
    make_engine,
    prompts_of,
    tokens_of,
)

from ssmcore.engine.drafting import NgramIndex
from ssmcore.engine.requests import SamplingParams
from ssmcore.errors import CombinationError

PROMPTS = prompts_of(1, 3, 64, 65, 130)


@pytest.fixture(scope="module")
def plain() -> list[tuple[int, ...]]:
    return greedy(PROMPTS, 48)


@pytest.mark.parametrize("graph", ["none", "full-decode"])
@pytest.mark.parametrize("drafts", [1, 4])
@pytest.mark.parametrize(
    "cache",
    [{"name": "none"}, {"name": "align", "block_size": 1}, {"name": "align", "block_size": 16}],
)
def test_drafts_change_no_token(plain, cache, drafts, graph):
    sections = {"cache": cache, "graph": {"name": graph}, "engine": {"num_spec_tokens": drafts}}
    assert greedy(PROMPTS, 48, **sections) == plain


def test_drafts_save_steps():
    params = SamplingParams(max_tokens=60, ignore_eos=True)
    with make_engine(engine={"num_spec_tokens": 3}) as engine:
        engine.generate([TEXT.decode()], params)
        stats = engine.stats()
    assert 0 < stats.accepted_drafts <= stats.drafted_tokens
    assert stats.generated_tokens == 60
    assert stats.steps == 1 + 59 - stats.accepted_drafts


def test_sampled_tokens_are_those_without_drafts():
    params = SamplingParams(max_tokens=60, temperature=0.6, top_p=0.9, seed=3, ignore_eos=True)
    with make_engine() as engine:
        wanted = [tokens_of(output) for output in engine.generate(PROMPTS, params)]
    with make_engine(engine={"num_spec_tokens": 3}) as engine:
        outputs = engine.generate(PROMPTS, params)
        assert engine.stats().accepted_drafts > 0
    assert [tokens_of(output) for output in outputs] == wanted


@pytest.mark.parametrize("budget", [4, 5, 70])
def test_prefix_hits_preemption_and_tight_budgets_change_no_token(plain, budget):
    sections = {
        "cache": {"name": "align", "block_size": 8, "memory": f"{13 * SLOT_BYTES} B"},
        "engine": {"num_spec_tokens": 3, "max_num_batched_tokens": max(budget, 8)},
    }
    with make_engine(**sections) as engine:
        params = SamplingParams(max_tokens=48, ignore_eos=True)
        for _ in range(2):
            outputs = engine.generate(PROMPTS, params)
            assert [tokens_of(output) for output in outputs] == plain
            assert_idle(engine)
        assert engine.stats().preemptions > 0


def test_ends_are_those_without_drafts():
    params = SamplingParams(max_tokens=60, stop=["self"], logprobs=1)
    with make_engine() as engine:
        wanted = engine.generate([TEXT.decode()], params)[0]
    with make_engine(engine={"num_spec_tokens": 4}) as engine:
        output = engine.generate([TEXT.decode()], params)[0]
    assert (output.text, output.token_ids) == (wanted.text, wanted.token_ids)
    assert output.finish_reason == wanted.finish_reason
    assert [entry.token_id for entry in output.logprobs] == list(output.token_ids)


def test_max_tokens_is_kept_whatever_was_drafted():
    for most in range(1, 12):
        assert len(greedy([list(TEXT[:200])], most, engine={"num_spec_tokens": 4})[0]) == most


def test_combinations_that_cannot_draft_are_refused():
    with pytest.raises(CombinationError, match=r"replay-torch.*num_spec_tokens = 2"):
        make_engine(decode={"name": "replay-torch"}, engine={"num_spec_tokens": 2})
    with pytest.raises(CombinationError, match=r"'all'.*num_spec_tokens = 2"):
        make_engine(cache={"name": "all", "block_size": 64}, engine={"num_spec_tokens": 2})
    with pytest.raises(CombinationError, match=r"at least 4"):
        make_engine(engine={"num_spec_tokens": 3, "max_num_batched_tokens": 3})


def test_drafts_are_what_followed_the_longest_match():
    tokens = [1, 2, 3, 4, 9, 2, 3, 5, 1, 2, 3]
    index = NgramIndex(tokens)
    assert index.draft(2) == [4, 9]
    tokens.append(5)
    assert index.draft(9) == [1, 2, 3, 5]
    tokens.append(77)
    assert index.draft(3) == []
