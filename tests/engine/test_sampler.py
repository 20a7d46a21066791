"""Sampling against exact distributions, with fixed seeds."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from ssmcore.engine.requests import SamplingParams
from ssmcore.engine.sampler import logprobs_of, sample, uniforms
from ssmcore.errors import RequestError

LOGITS = torch.log(torch.tensor([0.4, 0.05, 0.25, 0.1, 0.2]))


def draws(params: SamplingParams, count: int = 20_000) -> np.ndarray:
    """How often each token is drawn at `count` positions."""
    tokens = sample(LOGITS.expand(count, -1), [params] * count, [5] * count, list(range(count)))
    return np.bincount(tokens, minlength=5) / count


def test_uniforms_are_uniform_and_depend_on_seed_and_position():
    numbers = uniforms([3] * 10_000, range(10_000))
    counts = np.histogram(numbers, bins=20, range=(0, 1))[0]
    assert ((counts - 500) ** 2 / 500).sum() < 45  # chi-square, 19 degrees: p < 0.001
    assert len({*uniforms([1, 2, 1], [1, 1, 2]).tolist()}) == 3
    assert uniforms([2**64 - 1], [2**40])[0] == uniforms([2**64 - 1], [2**40])[0]


@pytest.mark.parametrize(
    ("options", "wanted"),
    [
        ({}, [0.4, 0.05, 0.25, 0.1, 0.2]),
        ({"top_k": 2}, [0.4 / 0.65, 0, 0.25 / 0.65, 0, 0]),
        ({"top_p": 0.6}, [0.4 / 0.65, 0, 0.25 / 0.65, 0, 0]),
        ({"top_p": 0.4}, [1, 0, 0, 0, 0]),
        ({"top_k": 3, "top_p": 0.5}, [0.4 / 0.65, 0, 0.25 / 0.65, 0, 0]),
        ({"min_p": 0.45}, [0.4 / 0.85, 0, 0.25 / 0.85, 0, 0.2 / 0.85]),
        ({"top_k": 1}, [1, 0, 0, 0, 0]),
        ({"min_p": 1.0}, [1, 0, 0, 0, 0]),
        ({"top_k": 100}, [0.4, 0.05, 0.25, 0.1, 0.2]),
    ],
)
def test_filters_leave_the_distribution_they_should(options, wanted):
    found = draws(SamplingParams(temperature=1.0, **options))
    np.testing.assert_allclose(found, wanted, atol=0.015)
    assert (found[np.array(wanted) == 0] == 0).all()


def test_temperature_sharpens():
    weights = np.exp(LOGITS.numpy() / 0.5)
    np.testing.assert_allclose(
        draws(SamplingParams(temperature=0.5)), weights / weights.sum(), atol=0.015
    )


def test_zero_temperature_is_greedy_beside_sampled_rows():
    hot = SamplingParams(temperature=5.0, seed=1)
    tokens = sample(
        LOGITS.expand(3, -1), [SamplingParams(), hot, SamplingParams()], [0] * 3, [9] * 3
    )
    assert (tokens[0], tokens[2]) == (0, 0)


def test_a_row_does_not_depend_on_its_neighbours():
    hot = SamplingParams(temperature=1.3, top_p=0.9)
    crowd = sample(LOGITS.expand(7, -1), [hot] * 7, list(range(7)), [4] * 7)
    alone = [sample(LOGITS[None], [hot], [seed], [4])[0] for seed in range(7)]
    assert crowd == alone


def test_extreme_logits_do_not_break_sampling():
    logits = torch.tensor([[-1e30, 0.0, -1e30], [1e30, 0.0, 0.0], [float("-inf"), 1.0, 0.0]])
    hot = SamplingParams(temperature=1e-5)
    assert sample(logits, [hot] * 3, [1] * 3, [1] * 3) == [1, 0, 1]


def test_logprobs_sum_to_one():
    entry = logprobs_of(LOGITS[None], [2], [5])[0]
    assert entry.logprob == pytest.approx(np.log(0.25), abs=1e-6)
    assert np.exp([score for _, score in entry.top]).sum() == pytest.approx(1.0)
    assert [token for token, _ in entry.top] == [0, 2, 4, 3, 1]


@pytest.mark.parametrize(
    "bad",
    [
        {"max_tokens": 0},
        {"max_tokens": 2.5},
        {"max_tokens": True},
        {"temperature": -1},
        {"temperature": float("nan")},
        {"temperature": "hot"},
        {"temperature": 1e-9},
        {"top_k": -1},
        {"top_p": 0},
        {"top_p": 1.5},
        {"min_p": -0.1},
        {"min_p": 2},
        {"seed": -1},
        {"seed": 2**64},
        {"stop": [""]},
        {"stop": 3},
        {"stop": [3]},
        {"stop_token_ids": ["a"]},
        {"logprobs": -1},
        {"ignore_eos": 1},
    ],
)
def test_bad_parameters_are_refused_by_name(bad):
    with pytest.raises(RequestError, match=next(iter(bad))):
        SamplingParams(**bad)
