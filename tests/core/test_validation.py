"""Every step that must be refused is, with its code and row, before anything is written."""

from __future__ import annotations

import numpy as np
import pytest
from planning_builders import make_pipeline, make_step

from ssmcore.errors import StepError
from ssmcore.step import Step


def refusal(pipeline, step) -> StepError:
    with pytest.raises(StepError) as caught:
        pipeline.plan(step() if callable(step) else step)
    return caught.value


def lists(**changes):
    step = {
        "query_start_loc": [0, 1, 2],
        "seq_lens": [5, 6],
        "is_prefilling": [False, False],
        "block_table": [[1], [2]],
    }
    return {**step, **changes}


@pytest.mark.parametrize(
    ("changes", "code", "row"),
    [
        ({"query_start_loc": [1, 2, 3]}, "query_start_loc", 0),
        ({"query_start_loc": [0, 2, 1]}, "query_start_loc", 1),
        ({"query_start_loc": [0, 1]}, "length", None),
        ({"seq_lens": [5]}, "length", None),
        ({"is_prefilling": [False]}, "length", None),
        ({"block_table": [[1]]}, "length", None),
        ({"block_table": [[1], [2, 3]]}, "length", 1),
        ({"decode_base": [1]}, "length", None),
        ({"query_start_loc": [0, 0, 0]}, "empty", None),
        ({"query_start_loc": [0, 1, 8]}, "seq_len", 1),
        ({"seq_lens": [5, 257]}, "max_model_len", 1),
        ({"query_start_loc": [0, 0, 1]}, "padding", 0),
        ({"block_table": [[1], [-2]]}, "slot_range", 1),
        ({"block_table": [[1], [2**31]]}, "slot_range", 1),
        ({"block_table": [[1], [0]]}, "null_slot", 1),
        ({"block_table": [[3], [3]]}, "slot_conflict", 1),
        ({"block_table": [[], []]}, "block_table_width", 0),
        ({"num_accepted_tokens": [1, 2]}, "num_accepted_tokens", 1),
        ({"num_accepted_tokens": [0, 1]}, "num_accepted_tokens", 0),
        ({"num_draft_tokens": [-1, 1]}, "num_draft_tokens", 1),
        ({"num_draft_tokens": [-2, 0]}, "num_draft_tokens", 0),
        ({"decode_base": [3, -1]}, "decode_base", 1),
        ({"seq_lens": [5, 6.0]}, "type", 1),
        ({"seq_lens": [5, True]}, "type", 1),
        ({"seq_lens": [5, float("nan")]}, "type", 1),
        ({"seq_lens": [5, "6"]}, "type", 1),
        ({"seq_lens": [5, None]}, "type", 1),
        ({"seq_lens": [5, 2**70]}, "type", 1),
        ({"seq_lens": "56"}, "type", None),
        ({"seq_lens": 5}, "type", None),
        ({"is_prefilling": [0, 1]}, "type", 0),
        ({"block_table": [1, 2]}, "type", None),
        ({"block_table": {"0": 1}}, "type", None),
        ({"seq_lens": None}, "key", None),
        ({"colour": [1]}, "key", None),
    ],
)
def test_a_bad_step_is_refused(changes, code, row):
    error = refusal(make_pipeline(), lambda: Step.from_dict(lists(**changes)))
    assert (error.code, error.row) == (code, row), str(error)


def test_a_step_without_rows_is_refused():
    empty = {"query_start_loc": [0], "seq_lens": [], "is_prefilling": [], "block_table": []}
    assert refusal(make_pipeline(), lambda: Step.from_dict(empty)).code == "empty"


def test_more_rows_than_max_num_seqs_are_refused():
    step = make_step([(1, 5)] * 3)
    error = refusal(make_pipeline(max_num_seqs=2), step)
    assert error.code == "max_num_seqs"
    assert "3" in str(error)
    make_pipeline(max_num_seqs=3).plan(step)


def test_a_slot_outside_the_attached_pool_is_refused():
    step = make_step([(1, 5), (1, 5)], table=[[1], [8]])
    error = refusal(make_pipeline(num_slots=8), step)
    assert (error.code, error.row) == ("slot_range", 1)
    make_pipeline(num_slots=9).plan(step)


def test_padding_is_refused_in_a_step_with_prefills():
    step = make_step([(3, 3), (0, 0)])
    assert refusal(make_pipeline(), step).code == "padding"


def test_padding_rows_need_no_slots():
    plan = make_pipeline().plan(make_step([(1, 5), (0, 0), (0, 0)]))
    assert plan.decode.host["write_slots"].tolist() == [1, 0, 0]


@pytest.mark.parametrize("cache", ["align", "all"])
def test_a_table_too_narrow_for_the_sequence_is_refused(cache):
    pipeline = make_pipeline(cache=cache)
    assert refusal(pipeline, make_step([(1, 9)], width=2)).code == "block_table_width"
    pipeline.plan(make_step([(1, 8)], width=2))


@pytest.mark.parametrize("cache", ["none", "align", "all"])
def test_a_table_too_narrow_for_the_draft_columns_is_refused(cache):
    pipeline = make_pipeline(cache=cache, num_spec_tokens=2)
    accepted = {"num_accepted_tokens": [1]}
    error = refusal(pipeline, make_step([(1, 4)], width=2, **accepted))
    assert error.code == "block_table_width"
    pipeline.plan(make_step([(1, 4)], width=3, **accepted))


def test_a_row_may_read_the_null_slot_only_without_prior_tokens():
    pipeline = make_pipeline(cache="align")
    table = [[0, 2]]
    assert refusal(pipeline, make_step([(1, 5)], table=table)).row == 0  # reads column 0
    pipeline.plan(make_step([(1, 6)], table=table))
    pipeline.plan(make_step([(5, 5)], table=table))


def test_every_block_that_all_writes_needs_a_slot():
    pipeline = make_pipeline(cache="all")
    assert refusal(pipeline, make_step([(9, 9)], table=[[1, 0, 3]])).code == "null_slot"
    make_pipeline(cache="align").plan(make_step([(9, 9)], table=[[0, 0, 3]]))


def test_a_shared_block_may_be_read_by_two_rows_but_written_by_none():
    pipeline = make_pipeline(cache="align")
    pipeline.plan(make_step([(1, 5), (1, 5)], table=[[1, 2], [1, 3]]))
    error = refusal(pipeline, make_step([(1, 5), (1, 4)], table=[[1, 2], [1, 3]]))
    assert (error.code, error.row) == ("slot_conflict", 0)
    assert "slot 1" in str(error)


def test_conflicts_are_found_among_very_large_slots():
    big = 2**31 - 2
    pipeline = make_pipeline(cache="align")
    pipeline.plan(make_step([(1, 5), (1, 5)], table=[[1, big], [1, big - 1]]))
    error = refusal(pipeline, make_step([(1, 5), (1, 5)], table=[[1, big], [2, big]]))
    assert error.code == "slot_conflict"
    assert str(big) in str(error)


def test_replay_needs_decode_base():
    pipeline = make_pipeline(decode="replay-torch")
    assert refusal(pipeline, make_step([(1, 5)])).code == "decode_base"
    pipeline.plan(make_step([(1, 5)], decode_base=[4]))


def test_a_decode_behind_a_prefill_is_refused_where_prefill_would_be_wrong():
    step = make_step([(3, 3), (1, 5)], decode_base=[3, 4])
    assert make_pipeline().plan(step).num_prefills == 2
    error = refusal(make_pipeline(decode="replay-torch"), step)
    assert (error.code, error.row) == ("row_order", 1)
    spec = make_step([(3, 3), (1, 5)], width=2, num_accepted_tokens=[1, 1])
    error = refusal(make_pipeline(num_spec_tokens=1), spec)
    assert (error.code, error.row) == ("row_order", 1)


def test_arrays_of_a_wrong_dtype_are_refused():
    good = make_step([(1, 5)])
    with pytest.raises(StepError, match="seq_lens must be one-dimensional int64"):
        Step(
            good.query_start_loc,
            good.seq_lens.astype(np.int32),
            good.is_prefilling,
            good.block_table,
        )


def test_a_refused_step_leaves_the_last_plan_intact():
    pipeline = make_pipeline(cache="all", device="cpu")
    plan = pipeline.plan(make_step([(1, 5), (1, 7)], width=2))
    before = {name: plan.decode.tensor(name).clone() for name in plan.decode.host}
    refusal(pipeline, make_step([(1, 5), (1, 5)], table=[[1, 2], [3, 2]]))
    for name, tensor in before.items():
        assert tensor.equal(plan.decode.tensor(name))
