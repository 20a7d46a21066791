"""The ring's cursors over whole lives of requests, stated as rules."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st
from planning_builders import make_pipeline, make_step


@given(
    prompt=st.integers(1, 39),
    buffer_len=st.integers(1, 20),
    block_size=st.integers(1, 16),
    cache=st.sampled_from(["none", "align", "all"]),
)
@settings(max_examples=120, deadline=None)
def test_every_token_is_folded_exactly_once_and_never_across_a_block(
    prompt, buffer_len, block_size, cache
):
    """Simulates what a slot holds: tokens in its whole state, and tokens pending in its ring."""
    pipeline = make_pipeline(
        cache=cache, block_size=block_size, decode="replay-torch", buffer_len=buffer_len
    )
    width = pipeline.selection.cache.table_width(256)
    whole: dict[int, int] = {}  # slot -> tokens folded into its whole state
    ring: dict[int, list[int]] = {}  # slot -> token numbers pending
    computed = 0
    while computed < prompt + 3 * buffer_len + 2 * block_size:
        prefilling = computed < prompt
        tokens = min(prompt - computed, 7) if prefilling else 1
        step = make_step(
            [(tokens, computed + tokens)],
            width=width,
            prefilling=[prefilling],
            decode_base=[prompt],
        )
        plan = pipeline.plan(step)
        if plan.prefill is not None:
            host = plan.prefill.host
            if computed:
                assert whole[int(host["state_read_slots"][0])] == computed
            ends, slots = host["write_ends"], host["state_write_slots"]
            for end, slot in zip(ends.tolist(), slots.tolist(), strict=True):
                whole[slot] = computed + end
                ring[slot] = []
        else:
            host = plan.decode.host
            read, write = int(host["state_read_slots"][0]), int(host["write_slots"][0])
            pos, flush = int(host["write_pos"][0]), bool(host["is_flush"][0])
            pending = ring.get(write, [])[:pos] if pos else []
            assert len(pending) == pos
            assert pos < buffer_len
            assert whole[read] + pos == computed
            assert pending == list(range(computed - pos, computed))
            if flush:
                whole[write] = computed + 1
                ring[write] = []
            else:
                ring[write] = [*pending, computed]
            assert flush or pos < buffer_len - 1
            if cache != "none" and (computed + 1) % block_size == 0:
                assert flush, "a whole state stands at every block end"
        computed += tokens


def test_the_ring_is_anchored_anew_when_a_request_is_resumed():
    pipeline = make_pipeline(decode="replay-torch", buffer_len=8)
    resumed = pipeline.plan(make_step([(1, 31)], decode_base=[30]))
    assert resumed.decode.host["write_pos"].tolist() == [0]
    stale = pipeline.plan(make_step([(1, 31)], decode_base=[20]))
    assert stale.decode.host["write_pos"].tolist() == [2]


def test_a_leftover_prompt_token_flushes():
    plan = make_pipeline(decode="replay-torch", buffer_len=8).plan(
        make_step([(1, 5)], prefilling=[True], decode_base=[6])
    )
    assert plan.decode.host["write_pos"].tolist() == [0]
    assert plan.decode.host["is_flush"].tolist() == [True]
