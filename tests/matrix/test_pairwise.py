"""The cover holds every pair; the axes hold what the registry offers."""

from __future__ import annotations

from itertools import combinations, product

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import Field

from ssmcore.strategies import StrategyOptions
from ssmcore.testing.matrix import option_sets, shard_of, telling_values
from ssmcore.testing.pairwise import pairwise_cover


def pairs(cases):
    return {
        (a, b, case[a], case[b]) for case in cases for a, b in combinations(range(len(case)), 2)
    }


@given(
    st.integers(2, 5).flatmap(
        lambda axes: st.lists(
            st.tuples(*[st.integers(0, 3)] * axes), min_size=1, max_size=40, unique=True
        )
    ),
    st.integers(0, 3),
)
def test_cover_holds_every_pair_of_any_case(cases, seed):
    chosen = pairwise_cover(cases, seed)
    assert len(set(chosen)) == len(chosen)
    assert pairs(cases[at] for at in chosen) == pairs(cases)


def test_cover_is_small_and_seeded():
    cases = list(product(range(4), repeat=6))
    chosen = pairwise_cover(cases, 0)
    assert 16 <= len(chosen) <= 32
    assert chosen == pairwise_cover(cases, 0)
    assert chosen != pairwise_cover(cases, 1)


def test_cover_takes_the_cheaper_of_equals():
    cases = [(a, b, c) for a in range(3) for b in range(3) for c in ("cheap", "dear")]
    costs = [1 if case[2] == "cheap" else 2 for case in cases]
    chosen = [cases[at] for at in pairwise_cover(cases, 0, costs)]
    assert pairs(chosen) == pairs(cases)
    assert [case[2] for case in chosen].count("dear") == 3


def test_cover_of_one_axis_and_of_nothing():
    assert pairwise_cover([("a",), ("b",)]) == [0, 1]
    assert pairwise_cover([]) == []


def test_shards_together_are_everything_once():
    cases = list(range(10))
    parts = [shard_of(cases, number, 3) for number in (1, 2, 3)]
    assert sorted(case for part in parts for case in part) == cases
    with pytest.raises(ValueError, match="no shard 4 of 3"):
        shard_of(cases, 4, 3)


class Options(StrategyOptions):
    length: int = Field(default=16, ge=1, le=64)
    above: int = Field(default=8, gt=4, lt=9)
    open: int = 5
    on: bool = True
    text: str = "as it is"


def test_option_values_are_bounds_and_some_between():
    values = {name: telling_values(field, 64) for name, field in Options.model_fields.items()}
    assert values == {
        "length": [1, 7, 64],
        "above": [5, 7, 8],
        "open": [7, 64, 256],
        "on": [False, True],
        "text": ["as it is"],
    }
    assert (("length", 7),) in option_sets(Options, 64)
    assert option_sets(StrategyOptions, 64) == [()]
