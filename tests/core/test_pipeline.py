"""Plans: classes, chunks, slots, padding, addresses; the rules against plain loops."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from planning_builders import make_pipeline, make_step

from ssmcore.errors import StepError


def test_a_first_chunk_is_never_a_decode():
    plan = make_pipeline().plan(make_step([(1, 1)], prefilling=[True]))
    assert (plan.num_decodes, plan.num_prefills) == (0, 1)
    assert plan.prefill.host["has_initial_states"].tolist() == [False]


def test_a_one_token_prompt_tail_is_promoted():
    plan = make_pipeline().plan(make_step([(1, 5), (1, 9)], prefilling=[True, False]))
    assert plan.num_decodes == 2


def test_a_padded_prompt_tail_is_promoted_only_with_its_drafts():
    pipeline = make_pipeline(num_spec_tokens=2)
    step = {"width": 3, "prefilling": [True], "num_accepted_tokens": [1]}
    assert pipeline.plan(make_step([(3, 9)], num_draft_tokens=[2], **step)).num_decodes == 1
    assert pipeline.plan(make_step([(3, 9)], num_draft_tokens=[-1], **step)).num_decodes == 0
    assert pipeline.plan(make_step([(3, 3)], num_draft_tokens=[2], **step)).num_decodes == 0


def test_decodes_are_the_leading_run():
    step = make_step([(1, 5), (3, 3), (1, 7)], prefilling=[False, True, False])
    plan = make_pipeline().plan(step)
    assert (plan.num_decodes, plan.num_prefills, plan.num_prefill_tokens) == (1, 2, 4)


@given(
    rows=st.lists(st.tuples(st.integers(1, 40), st.integers(0, 40)), min_size=1, max_size=6),
    chunk_size=st.integers(1, 9),
    block_size=st.integers(1, 9),
)
@settings(max_examples=150, deadline=None)
def test_chunks_and_programs_equal_a_plain_loop(rows, chunk_size, block_size):
    pipeline = make_pipeline(cache="all", block_size=block_size, chunk_size=chunk_size)
    step = make_step([(q, q + c) for q, c in rows], width=80, prefilling=[True] * len(rows))
    prefilling = [i for i, (q, c) in enumerate(rows) if not (q == 1 and c > 0)]
    first = prefilling[0] if prefilling else len(rows)
    prefills = rows[first:]
    plan = pipeline.plan(step)
    assert plan.num_decodes == first
    if not prefills:
        assert plan.prefill is None
        return
    cu, seq_idx, last, batch_ptr, offsets = [0], [], [], [], []
    writes = []
    for row, (q, c) in enumerate(prefills):
        at = c
        start = cu[-1]
        while at < q + c:
            end = min(at // chunk_size * chunk_size + chunk_size, q + c)
            cu.append(cu[-1] + end - at)
            seq_idx.append(row)
            at = end
        last.append(len(seq_idx) - 1)
        batch_ptr += [row] * -(-q // 8)
        offsets += range(-(-q // 8))
        ends = [p for p in range(c + 1, q + c) if p % block_size == 0] + [q + c]
        writes += [(row, start + p - c) for p in ends]
    out = plan.to_dict()["prefill"]
    assert out["chunks"] == {"cu_seqlens": cu, "seq_idx": seq_idx, "last_indices": last}
    assert out["conv"] == {"batch_ptr": batch_ptr, "token_chunk_offset": offsets}
    assert list(zip(out["writes"]["rows"], out["writes"]["ends"], strict=True)) == writes
    assert out["num_state_writes"] == len(writes) - len(prefills)
    if block_size % chunk_size == 0:
        for chunk, end in zip(out["writes"]["chunks"], out["writes"]["ends"], strict=True):
            assert cu[chunk + 1] == end


def test_all_writes_the_state_at_every_boundary_exactly_once_whatever_the_split():
    block_size = 4
    for split in ((3, 1, 6, 2, 9, 1, 1, 5), (28,), (1,) * 28, (5, 5, 5, 5, 8)):
        pipeline = make_pipeline(cache="all", block_size=block_size)
        written: list[int] = []
        computed = 0
        for tokens in split:
            step = make_step([(tokens, computed + tokens)], width=12, prefilling=[True])
            plan = pipeline.plan(step).to_dict()
            if plan["prefill"]:
                written += [computed + end for end in plan["prefill"]["writes"]["ends"]]
                columns = [slot - 1 for slot in plan["prefill"]["writes"]["slots"]]
            else:
                written.append(computed + 1)
                columns = [plan["decode"]["write_slots"][0] - 1]
            assert columns == [(end - 1) // block_size for end in written[-len(columns) :]]
            computed += tokens
        assert [end for end in written if end % block_size == 0] == list(range(4, 29, 4))


def test_crossing_a_block_reads_the_old_slot_and_writes_the_new():
    plan = make_pipeline(cache="align").plan(make_step([(1, 5), (1, 6)], width=2))
    assert plan.decode.host["state_read_slots"].tolist() == [1, 4]
    assert plan.decode.host["conv_read_slots"].tolist() == [1, 4]
    assert plan.decode.host["write_slots"].tolist() == [2, 4]


def test_a_ring_that_lags_reads_the_block_of_its_last_whole_state():
    pipeline = make_pipeline(cache="align", block_size=8, decode="replay-torch", buffer_len=3)
    steps = [make_step([(1, n)], width=3, decode_base=[3]) for n in range(4, 20)]
    reads = [pipeline.plan(step).decode.host["state_read_slots"][0] for step in steps]
    # tokens 8..10 (n = 9..11) of block 1 read block 0 until the first flush, at n = 11
    assert reads == [1, 1, 1, 1, 1, 1, 1, 1, 2, 2, 2, 2, 2, 2, 2, 2]


def test_padding_rows_hold_pad_values_and_change_no_real_row():
    pipeline = make_pipeline(cache="all", decode="replay-torch", buffer_len=4)
    real = [(1, 5), (1, 9), (1, 12)]
    base = [3, 4, 5]
    alone = pipeline.plan(make_step(real, width=3, decode_base=base)).to_dict()
    padded = pipeline.plan(
        make_step(real + [(0, 0)] * 2, width=3, decode_base=[*base, 0, 0])
    ).to_dict()
    for part in ("decode", "cache"):
        for name, values in alone[part].items():
            if values is not None:
                assert padded[part][name][:3] == values, name
                assert not np.any(padded[part][name][3:]), name


def test_equal_row_counts_give_equal_addresses():
    pipeline = make_pipeline(cache="all", decode="replay-torch", device="cpu", max_num_seqs=8)
    addresses = set()
    for length in range(5, 105):
        rows = [(1, length), (1, length + 1), (0, 0)]
        plan = pipeline.plan(make_step(rows, width=64, decode_base=[3, 3, 0]))
        addresses.add(tuple(plan.decode.tensor(name).data_ptr() for name in plan.decode.host))
    assert len(addresses) == 1
    capture = pipeline.plan_for_capture(3)
    assert capture.key == plan.key
    assert tuple(capture.decode.tensor(n).data_ptr() for n in capture.decode.host) in addresses


def test_device_views_equal_host_views():
    pipeline = make_pipeline(cache="all", decode="replay-torch", device="cpu")
    for step in (
        make_step([(1, 5), (7, 9)], width=3, decode_base=[3, 9]),
        make_step([(1, 6), (1, 10)], width=3, decode_base=[3, 9]),
    ):
        plan = pipeline.plan(step)
        for part in (plan.decode, plan.prefill, plan.cache):
            for name, values in (part.host if part is not None else {}).items():
                assert part.tensor(name).tolist() == values.tolist()


def test_a_step_is_uploaded_in_one_copy(monkeypatch):
    from ssmcore.arena import Arena

    copies = []
    upload = Arena.upload
    monkeypatch.setattr(Arena, "upload", lambda self, n: (copies.append(n), upload(self, n))[1])
    pipeline = make_pipeline(cache="all", decode="replay-torch", device="cpu")
    pipeline.plan(make_step([(1, 5), (7, 9)], width=3, decode_base=[3, 9]))
    assert len(copies) == 1


def test_a_plan_is_not_disturbed_by_planning_the_next_step():
    pipeline = make_pipeline(decode="replay-torch")
    first = pipeline.plan(make_step([(1, 5)], decode_base=[4]))
    before = first.to_dict()
    pipeline.plan(make_step([(1, 6)], decode_base=[4]))
    assert first.to_dict() == before


def test_capture_plans_are_all_padding():
    pipeline = make_pipeline(num_spec_tokens=2, cache="all", graph="full-decode", max_num_seqs=4)
    plan = pipeline.plan_for_capture(3).to_dict()
    assert plan["num_decodes"] == 3
    assert plan["num_decode_tokens"] == 9
    assert plan["decode"]["num_accepted_tokens"] == [3, 3, 3]
    assert plan["decode"]["query_start_loc"] == [0, 3, 6, 9]
    assert not np.any(plan["decode"]["state_indices"])
    assert plan["cache"]["last_scheduled_block_prev_step"] == [0, 0, 0]
    for rows in (0, 5):
        with pytest.raises(StepError, match="must be 1 to 4"):
            pipeline.plan_for_capture(rows)


def test_another_block_table_changes_slots_and_nothing_else():
    pipeline = make_pipeline(cache="all", decode="replay-torch", device="cpu")
    rows = [(1, 6), (5, 9)]
    plan = pipeline.plan(make_step(rows, width=3, decode_base=[3, 9]))
    before = plan.to_dict()
    other_table = [[11, 12, 13], [14, 15, 16]]
    other = plan.with_block_table(other_table)
    wanted = make_pipeline(cache="all", decode="replay-torch").plan(
        make_step(rows, table=other_table, decode_base=[3, 9])
    )
    assert other.to_dict() == wanted.to_dict()
    assert plan.to_dict() == before
    for name in plan.decode.host:
        assert plan.decode.tensor(name).tolist() == before["decode"][name]
    with pytest.raises(StepError, match=r"1 rows, the step has 2"):
        plan.with_block_table([[1, 2, 3]])


def test_another_block_table_is_refused_with_speculative_tokens():
    pipeline = make_pipeline(num_spec_tokens=1)
    plan = pipeline.plan(make_step([(1, 6)], width=2, num_accepted_tokens=[1]))
    with pytest.raises(StepError, match="speculative"):
        plan.with_block_table([[3, 4]])


def test_a_step_beyond_the_token_budget_is_still_planned():
    pipeline = make_pipeline(max_num_batched_tokens=8, max_model_len=4096, chunk_size=1)
    plan = pipeline.plan(make_step([(4000, 4000)]))
    assert plan.to_dict()["prefill"]["chunks"]["cu_seqlens"] == list(range(4001))


def test_observers_see_every_plan():
    seen = []

    class Listener:
        def step_planned(self, plan):
            seen.append(plan.num_reqs)

        def step_run(self, plan, seconds): ...

    pipeline = make_pipeline()
    pipeline.observers = (Listener(),)
    pipeline.plan(make_step([(1, 5), (1, 6)]))
    assert seen == [2]
