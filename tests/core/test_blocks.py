"""Block arithmetic, whatever the divisor, and slots looked up in tables of any layout."""

from __future__ import annotations

import numpy as np
import pytest
from planning_builders import make_pipeline, make_step

from ssmcore.blocks import block_start, column_after, counting, quotient, remainder
from ssmcore.step import Step

TOKENS = np.array([-17, -1, 0, 1, 7, 8, 9, 255, 256, 257, 2**40], dtype=np.int64)


@pytest.mark.parametrize("divisor", [1, 2, 3, 8, 9, 100, 256, 2**31 - 1])
def test_powers_of_two_and_others_divide_alike(divisor):
    assert quotient(TOKENS, divisor).tolist() == [n // divisor for n in TOKENS.tolist()]
    assert remainder(TOKENS, divisor).tolist() == [n % divisor for n in TOKENS.tolist()]


@pytest.mark.parametrize("size", [1, 3, 8])
def test_columns_and_block_starts_follow_their_formulas(size):
    tokens = np.arange(40)
    assert column_after(tokens, size).tolist() == [max(0, (n - 1) // size) for n in range(40)]
    assert block_start(tokens, size).tolist() == [n // size * size for n in range(40)]


def test_counting_is_the_same_beyond_what_is_kept():
    assert counting(2**16 + 3)[-1] == 2**16 + 2
    with pytest.raises(ValueError, match="read-only"):
        counting(3)[0] = 1


@pytest.mark.parametrize("dtype", [np.int32, np.int64])
def test_a_table_that_is_a_window_of_a_larger_one_gives_the_same_plan(dtype):
    rows = [(1, 9), (1, 14), (6, 11)]
    options = {"cache": "align", "decode": "replay-torch"}
    wanted = make_pipeline(**options).plan(make_step(rows, width=4, decode_base=[5, 6, 11]))
    step = make_step(rows, width=4, decode_base=[5, 6, 11])
    large = np.full((5, 9), -1, dtype=dtype)
    large[1:4, 2:6] = step.block_table
    window = Step(
        step.query_start_loc,
        step.seq_lens,
        step.is_prefilling,
        large[1:4, 2:6],
        step.decode_base,
    )
    assert make_pipeline(**options).plan(window).to_dict() == wanted.to_dict()


def test_plans_of_changing_mixes_do_not_disturb_each_other():
    pipeline = make_pipeline(cache="all", decode="replay-torch", device="cpu")
    mixes = [[(1, 5), (7, 9)], [(1, 5), (1, 9)], [(3, 3), (7, 9)], [(1, 6), (20, 24)]]
    for rows in mixes * 3:
        step = make_step(rows, width=6, decode_base=[3, 9])
        plan = pipeline.plan(step)
        wanted = make_pipeline(cache="all", decode="replay-torch").plan(step).to_dict()
        assert plan.to_dict() == wanted
        for part in (plan.decode, plan.prefill, plan.cache):
            for name, values in (part.host if part is not None else {}).items():
                assert part.tensor(name).tolist() == values.tolist(), name
