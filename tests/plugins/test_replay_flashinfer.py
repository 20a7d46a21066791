"""`replay-flashinfer`: its cursors drive FlashInfer's ring rule over whole lives of requests, and
its results are the recurrence's, with the rule played in torch.
"""

from __future__ import annotations

import sys
import types
from dataclasses import fields, replace

import checkpointing_builders as emulated
import pytest
import ssmcore_kernels.flashinfer
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_builders import MixerInputs, generator
from planning_builders import make_pipeline, make_step
from ssmcore_kernels.flashinfer import checkpointing
from ssmcore_plugins import replay_flashinfer
from ssmcore_plugins.replay_flashinfer import FlashInferOptions, ReplayFlashInfer, unavailable

from ssmcore.pipeline import Pipeline
from ssmcore.state import slot_tensors
from ssmcore.strategies import CreateContext, DecodeInputs, Limits, MixerShape, Selection

NAN = float("nan")
CACHES = ["none", "align", "all"]


def pipeline_of(cache="none", block_size=4, buffer_len=4, **more) -> Pipeline:
    base = make_pipeline(cache=cache, block_size=block_size, **more).selection
    strategy = ReplayFlashInfer(
        FlashInferOptions(buffer_len=buffer_len), CreateContext(base.limits)
    )
    names = {**base.names, "decode": "replay-flashinfer"}
    return Pipeline(replace(base, decode=strategy, names=names))


class Slot:
    """Tokens in a slot's whole state, and the token that each ring entry holds."""

    def __init__(self, entries):
        self.whole = 0
        self.ring = [None] * entries


def live(pipeline, slots, prompt, chunk, steps, entries, table):
    """One request's life: prefill in chunks of `chunk`, then `steps` tokens, rule by rule."""
    computed = 0
    while computed < prompt + steps:
        prefilling = computed < prompt
        tokens = min(prompt - computed, chunk) if prefilling else 1
        plan = pipeline.plan(
            make_step(
                [(tokens, computed + tokens)],
                prefilling=[prefilling],
                table=[table],
                decode_base=[prompt],
            )
        )
        if plan.prefill is not None:
            host = plan.prefill.host
            if computed:
                assert slots[int(host["state_read_slots"][0])].whole == computed
            ends, written = host["write_ends"].tolist(), host["state_write_slots"].tolist()
            for end, slot in zip(ends, written, strict=True):
                slots[slot].whole = computed + end
        else:
            decode(plan.decode.host, slots, computed, entries)
        computed += tokens
        yield computed, plan


def decode(host, slots, token, entries):
    """What the carrying kernel, FlashInfer and the settling kernel do with a row's slots."""
    names = ("state_read_slots", "write_slots", "ring_start", "prev_num_accepted_tokens")
    read, write, start, pending = (int(host[name][0]) for name in names)
    slot = slots[write]
    if pending == 0 and read != write:
        slot.whole = slots[read].whole
    old = [slot.ring[(start + entry) % entries] for entry in range(pending)]
    assert old == list(range(slot.whole, token)), "pending are the tokens since the state, in order"
    if pending + 2 > entries:
        slot.whole = token
    slot.ring[(start + pending) % entries] = token
    if count := int(host["fold_count"][0]):
        first = start + pending + 1 - count
        newest = [slot.ring[(first + entry) % entries] for entry in range(count)]
        assert newest == list(range(slot.whole, token + 1))
        slot.whole = token + 1


@given(
    buffer_len=st.integers(1, 16),
    block_size=st.integers(1, 9),
    cache=st.sampled_from(CACHES),
    lives=st.lists(st.tuples(st.integers(1, 20), st.integers(1, 9)), min_size=1, max_size=3),
)
@settings(max_examples=40, deadline=None)
def test_every_token_is_folded_once_in_order_and_nothing_stale_is_read(
    buffer_len, block_size, cache, lives
):
    """Requests follow one another in the same slots, whose rings keep what they held."""
    pipeline = pipeline_of(cache, block_size, buffer_len)
    steps, entries = 2 * buffer_len + block_size + 2, buffer_len + 1
    width = pipeline.selection.cache.table_width(64)
    table = list(range(1, 1 + width))
    slots = [Slot(entries) for _ in range(1 + width)]
    for prompt, chunk in lives:
        for slot in slots:  # tokens of another request are none of this one's
            slot.ring = [None if held is None else "stale" for held in slot.ring]
        for computed, plan in live(pipeline, slots, prompt, chunk, steps, entries, table):
            if cache != "none" and computed % block_size == 0:
                column = computed // block_size - 1
                assert slots[table[column]].whole == computed, "whole at a block's end"
            if plan.decode is not None and computed <= prompt:
                assert slots[int(plan.decode.host["write_slots"][0])].whole == computed


def test_a_state_is_written_once_in_buffer_len_steps():
    pipeline, written = pipeline_of(buffer_len=4), []
    slots = [Slot(5), Slot(5)]
    for computed, _ in live(pipeline, slots, 3, 9, 13, 5, [1]):
        written.append(slots[1].whole)
        assert computed - slots[1].whole <= 4
    assert written == [3, 3, 3, 3, 3, 7, 7, 7, 7, 11, 11, 11, 11, 15]


def test_padding_rows_hold_pad_values():
    plan = pipeline_of(max_num_seqs=4).plan(make_step([(1, 9), (0, 0)], decode_base=[6, 0]))
    host = plan.decode.host
    assert host["prev_num_accepted_tokens"].tolist() == [2, 0]
    assert [host[name][1] for name in ("ring_start", "fold_count", "write_slots")] == [0, 0, 0]


SHAPE = (4, 3, 5, 2)  # heads, headdim, dstate, groups


@pytest.fixture
def played(monkeypatch):
    """The three calls of `ssmcore_kernels.flashinfer`, played in torch; their names as called."""
    calls = []

    def noted(function):
        def call(*args, **kwargs):
            calls.append(function.__name__)
            return function(*args, **kwargs)

        return call

    settle = types.ModuleType("ssmcore_kernels.flashinfer.settle")
    settle.carry_states = noted(emulated.carry_states)
    settle.settle_rows = noted(emulated.settle_rows)
    monkeypatch.setitem(sys.modules, settle.__name__, settle)
    monkeypatch.setattr(ssmcore_kernels.flashinfer, "settle", settle, raising=False)
    for name in ("make_scratch", "checkpointing_state_update"):
        monkeypatch.setattr(checkpointing, name, getattr(emulated, name))
    return calls


class Request:
    """One row's part of the tokens, its slots, and what the recurrence gives for it."""

    def __init__(self, inputs, first, prompt, steps, chunk, table):
        self.first, self.computed = first, 0
        self.prompt, self.total, self.chunk, self.table = prompt, prompt + steps, chunk, table
        self.y, self.states = inputs.oracle(slice(first, first + self.total))

    @property
    def query(self):
        left = self.prompt - self.computed
        return min(left, self.chunk) if left > 0 else 1

    @property
    def decodes(self):
        return self.computed > 0 and self.query == 1


class Lives:
    """Requests that prefill and then decode side by side through two layers.

    What is decoded, and the states that stand at block ends, are compared with the recurrence.
    `prompts`: prompt length and prefill chunk of each request.
    """

    shape, dtype, state_dtype, device = SHAPE, torch.float64, torch.float64, "cpu"

    def __init__(self, cache, block_size, buffer_len, prompts, steps, limit=(0.0, float("inf"))):
        made = pipeline_of(cache, block_size, buffer_len, max_num_seqs=len(prompts) + 1)
        self.strategy = made.selection.decode
        assert self.strategy.check(made.selection) is None
        self.pipeline = Pipeline(made.selection, device=self.device)
        self.block_size = None if cache == "none" else block_size
        self.width = made.selection.cache.table_width(256)
        tokens = sum(prompt + steps for prompt, _ in prompts)
        self.inputs = MixerInputs(generator(), tokens, self.shape, self.dtype, dt_limit=limit)
        self.requests, first = [], 0
        for row, (prompt, chunk) in enumerate(prompts):
            table = list(range(1 + row * self.width, 1 + (row + 1) * self.width))
            self.requests.append(Request(self.inputs, first, prompt, steps, chunk, table))
            first += prompt + steps
        slots = 1 + self.width * len(prompts)
        self.layers = [poisoned_layer(self, slots) for _ in range(2)]

    def run(self):
        while rows := [one for one in self.requests if one.computed < one.total]:
            for one in rows:
                if not one.decodes:
                    self.prefill(one)
            if rows := [one for one in rows if one.decodes]:
                self.decode(rows)

    def prefill(self, one):
        """Put the states where the plan of one chunk has them."""
        end = one.computed + one.query
        step = make_step(
            [(one.query, end)], prefilling=[True], table=[one.table], decode_base=[one.prompt]
        )
        host = self.pipeline.plan(step).prefill.host
        writes = zip(host["write_ends"].tolist(), host["state_write_slots"].tolist(), strict=True)
        for at, slot in writes:
            for slots in self.layers:
                state = one.states[one.computed + at - 1]
                slots["state"][slot] = state.to(self.device, self.state_dtype)
        one.computed = end

    def decode(self, rows):
        """One token of every row, and padding rows up to one more than all requests."""
        padding = len(self.requests) + 1 - len(rows)
        step = make_step(
            [(1, one.computed + 1) for one in rows] + [(0, 0)] * padding,
            prefilling=[one.computed < one.prompt for one in rows] + [False] * padding,
            table=[one.table for one in rows] + [[0] * self.width] * padding,
            decode_base=[one.prompt for one in rows] + [0] * padding,
        )
        tokens = [one.first + one.computed for one in rows] + [0] * padding
        for y in self.update(step, decode_inputs(self.inputs, tokens, self.device)):
            for row, one in enumerate(rows):
                self.compare(y[row], one.y[one.computed])
            assert not y[len(rows) :].any(), "a padding row gives zero"
        for one in rows:
            one.computed += 1
            ends_block = self.block_size and one.computed % self.block_size == 0
            for slots in self.layers:
                assert all(pool[0].isnan().all() for pool in slots.values()), "the null slot"
                if ends_block:
                    slot = one.table[one.computed // self.block_size - 1]
                    self.compare(slots["state"][slot], one.states[one.computed - 1])

    def update(self, step, given):
        plan = self.pipeline.plan(step).decode
        return [self.strategy.update(given, slots, plan) for slots in self.layers]

    def compare(self, got, want):
        torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-9)


class Played(Lives):
    """Nothing but a strategy and the sizes."""

    def __init__(self, strategy):
        self.strategy = strategy


def decode_inputs(inputs, tokens, device="cpu"):
    x, dt, B, C = (getattr(inputs, name)[tokens].to(device) for name in ("x", "dt", "B", "C"))
    D, bias = inputs.rest["D"].to(device), inputs.rest["dt_bias"].to(device)
    return DecodeInputs(x, dt, inputs.A.to(device), B, C, D, bias, inputs.rest["dt_limit"])


def poisoned_layer(lives, num_slots):
    """One layer's slots, all NaN: whatever is read must have been written first."""
    heads, headdim, dstate, groups = lives.shape
    activation, state = (
        str(one).removeprefix("torch.") for one in (lives.dtype, lives.state_dtype)
    )
    mixer = MixerShape(heads, headdim, dstate, groups, 4, activation, activation, state)
    pools = {}
    for one in slot_tensors(mixer, lives.strategy)[1:]:
        dtype = torch.float64 if lives.dtype == torch.float64 else getattr(torch, one.dtype)
        pools[one.name] = torch.full((num_slots, *one.shape), NAN, dtype=dtype, device=lives.device)
    return pools


@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize(("buffer_len", "block_size"), [(1, 1), (3, 4), (5, 2), (4, 8)])
def test_outputs_and_block_states_are_the_recurrences(played, cache, buffer_len, block_size):
    prompts = [(5, 9), (8, 7), (4, 3), (1, 1), (7, 1)]  # some end in leftovers
    Lives(cache, block_size, buffer_len, prompts, steps=buffer_len + block_size + 4).run()


def test_a_limited_dt_is_limited(played):
    Lives("none", 4, 3, [(3, 9)], steps=9, limit=(0.1, 0.7)).run()


class LivesOnGpu(Lives):
    """The same through FlashInfer itself."""

    shape, dtype, state_dtype, device = (64, 64, 128, 8), torch.bfloat16, torch.float32, "cuda"

    def compare(self, got, want):
        want = want.to(got.device)
        error = (got.double() - want).norm() / want.norm()
        assert error < self.strategy.error_bound, f"relative error {error:.2e}"


class LivesInAGraph(LivesOnGpu):
    """All decode steps replay one captured graph, as an engine's do."""

    graph = None

    def update(self, step, given):
        values = [getattr(given, one.name) for one in fields(given)]
        tensors = [value for value in values if isinstance(value, torch.Tensor)]
        if self.graph is None:
            plan = self.pipeline.plan_for_capture(len(step.seq_lens))
            self.key, self.given = plan.key, tensors
            for _ in range(2):
                self.through_layers(given, plan)
            torch.cuda.synchronize()
            self.graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self.graph):
                self.outputs = self.through_layers(given, plan)
        plan = self.pipeline.plan(step)
        assert plan.key == self.key
        for place, tensor in zip(self.given, tensors, strict=True):
            place.copy_(tensor)
        self.graph.replay()
        return self.outputs

    def through_layers(self, given, plan):
        return [self.strategy.update(given, slots, plan.decode) for slots in self.layers]


@pytest.mark.skipif(unavailable("cuda") is not None, reason="needs a GPU and FlashInfer")
@pytest.mark.parametrize("kind", [LivesOnGpu, LivesInAGraph])
@pytest.mark.parametrize("cache", CACHES)
def test_flashinfer_keeps_to_the_bound_over_whole_lives(kind, cache):
    prompts = [(5, 9), (12, 7), (4, 3), (7, 1)]
    kind(cache, 12, 16, prompts, steps=40).run()


def test_the_small_kernels_are_launched_only_where_rows_need_them(played):
    made = pipeline_of("align", 4, 8, max_num_seqs=2)
    pipeline, strategy = Pipeline(made.selection, device="cpu"), made.selection.decode
    slots, seen = poisoned_layer(Played(strategy), 6), []
    inputs = MixerInputs(generator(), 1, SHAPE)
    for computed in range(3, 9):
        step = make_step([(1, computed + 1)], table=[[1, 2, 3, 4, 5]], decode_base=[3])
        strategy.update(decode_inputs(inputs, [0]), slots, pipeline.plan(step).decode)
        seen.append(tuple(played))
        played.clear()
    carry, settle = ("carry_states",), ("settle_rows",)
    # at the first step both are compiled, so that no capture has to
    assert seen == [carry + settle, carry, (), (), settle, carry]


def test_a_plan_that_runs_again_puts_its_cursors_in_place_again(played):
    """As a warm-up and a capture do, between which another plan may have run."""
    made = pipeline_of(max_num_seqs=2)
    pipeline, strategy = Pipeline(made.selection, device="cpu"), made.selection.decode
    layers = [poisoned_layer(Played(strategy), 3) for _ in range(2)]
    given = decode_inputs(MixerInputs(generator(), 1, SHAPE), [0])
    plan = pipeline.plan(make_step([(1, 9)], table=[[1]], decode_base=[6])).decode
    for _ in range(2):
        for slots in layers:
            strategy.update(given, slots, plan)
            assert strategy._buffers.cursors[:, 1].tolist() == [0, 2]
        strategy._buffers.cursors.zero_()


MIXER = MixerShape(64, 64, 128, 8, 4, activation_dtype="bfloat16")


def selection_of(buffer_len=16, mixer=MIXER, **more) -> Selection:
    selection = pipeline_of(buffer_len=buffer_len, **more).selection
    return replace(selection, running=True, device="cuda", mixer=mixer)


@pytest.mark.parametrize("cache", CACHES)
def test_runs_in_every_cache_mode(cache):
    selection = selection_of(cache=cache)
    assert selection.decode.check(selection) is None


@pytest.mark.parametrize(
    ("selection", "other", "instead"),
    [
        (selection_of(17), "decode.buffer_len = 17", "at most 16"),
        (
            selection_of(mixer=replace(MIXER, activation_dtype="float32")),
            "model.dtype = 'float32'",
            "model.dtype = 'bfloat16'",
        ),
        (
            selection_of(mixer=replace(MIXER, state_dtype="float16")),
            "cache.state_dtype = 'float16'",
            "cache.state_dtype = 'bfloat16'",
        ),
        (selection_of(mixer=replace(MIXER, headdim=80)), "headdim of 80", "headdim of 64"),
        (selection_of(mixer=replace(MIXER, dstate=96)), "dstate of 96", "64, 128, 256"),
        (selection_of(num_spec_tokens=2), "engine.num_spec_tokens = 2", "'baseline'"),
    ],
)
def test_what_it_cannot_run_names_both_settings(selection, other, instead):
    conflict = selection.decode.check(selection)
    assert "decode.name = 'replay-flashinfer'" in conflict.setting
    assert other in conflict.other
    assert instead in conflict.instead


def test_a_longer_ring_plans_all_the_same():
    selection = pipeline_of(buffer_len=64).selection
    assert selection.decode.check(selection) is None


def test_a_model_is_not_needed_to_ask():
    selection = selection_of(mixer=None)
    assert selection.decode.check(selection) is None


def found(monkeypatch, version):
    monkeypatch.setattr(replay_flashinfer.importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(replay_flashinfer.importlib.metadata, "version", lambda name: version)


def test_unavailable_says_what_to_install(monkeypatch):
    monkeypatch.setattr(replay_flashinfer.importlib.util, "find_spec", lambda name: None)
    assert 'pip install "ssmcore[flashinfer]"' in unavailable("cuda")


def test_another_release_is_refused(monkeypatch):
    found(monkeypatch, "0.6.0")
    assert "0.6.0" in unavailable("cuda")
    assert "0.7.4" in unavailable("cuda")


def test_a_cpu_is_refused(monkeypatch):
    found(monkeypatch, "0.7.4")
    assert "NVIDIA GPU" in unavailable("cpu")


def test_start_up_can_say_that_a_kernel_is_compiled():
    context = CreateContext(Limits())
    notes = ReplayFlashInfer(FlashInferOptions(), context).start_up_notes
    assert any("compiles" in note for note in notes)
