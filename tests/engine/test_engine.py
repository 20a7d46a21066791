"""The engine on the bundled model: same tokens whatever else happens, and every way to end."""

from __future__ import annotations

import pytest
from engine_builders import (
    SLOT_BYTES,
    TEXT,
    assert_idle,
    greedy,
    make_engine,
    prompts_of,
    quickstart,
    tokens_of,
)

from ssmcore.engine.requests import SamplingParams
from ssmcore.errors import CapacityError, CombinationError, RequestError

PROMPTS = prompts_of(1, 2, 3, 4, 63, 64, 65, 130)


@pytest.fixture(scope="module")
def alone() -> list[tuple[int, ...]]:
    """What each prompt gives on an engine of its own."""
    return [greedy([prompt])[0] for prompt in PROMPTS]


def test_neighbours_do_not_change_a_request(alone):
    assert greedy(PROMPTS) == alone
    assert greedy(PROMPTS[::-1]) == alone[::-1]


@pytest.mark.parametrize("budget", [1, 3, 17, 64, 100])
def test_chunking_does_not_change_a_request(alone, budget):
    engine = {"max_num_batched_tokens": budget}
    assert greedy(PROMPTS[3:7], engine=engine) == alone[3:7]


@pytest.mark.parametrize("rows", [1, 3])
def test_waiting_for_a_row_does_not_change_a_request(alone, rows):
    assert greedy(PROMPTS, engine={"max_num_seqs": rows}) == alone


def test_requests_join_and_leave_at_any_step(alone):
    with make_engine(engine={"max_num_seqs": 4}) as engine:
        outputs: dict[str, tuple[int, ...]] = {}
        names = []
        for number, prompt in enumerate(PROMPTS):
            params = SamplingParams(max_tokens=24 if number % 2 else 9, ignore_eos=True)
            names.append(engine.add_request(prompt, params))
            for _ in range(number):
                _collect(engine.step(), outputs)
        while engine.has_work:
            _collect(engine.step(), outputs)
        assert_idle(engine)
    for number, name in enumerate(names):
        assert outputs[name] == alone[number][: 24 if number % 2 else 9]


def _collect(events, outputs) -> None:
    for event in events:
        if event.output is not None:
            outputs[event.request_id] = tokens_of(event.output)


@pytest.mark.parametrize("graph", ["none", "full-decode"])
@pytest.mark.parametrize(
    "cache",
    [
        {"name": "none"},
        {"name": "align", "block_size": 1},
        {"name": "align", "block_size": 7},
        {"name": "align", "block_size": 64},
        {"name": "all", "block_size": 64},
        {"name": "all", "block_size": 128},
    ],
)
@pytest.mark.parametrize(
    "decode", [{"name": "baseline"}, {"name": "replay-torch", "buffer_len": 5}]
)
def test_every_strategy_gives_the_same_tokens(alone, cache, decode, graph):
    assert greedy(PROMPTS, cache=cache, decode=decode, graph={"name": graph}) == alone


@pytest.mark.parametrize(
    "cache", [{"name": "align", "block_size": 16}, {"name": "all", "block_size": 64}]
)
def test_a_shared_prefix_is_computed_once_and_changes_nothing(cache):
    shared = list(TEXT[:200])
    prompts = [shared + list(b"def a"), shared + list(b"class B"), shared + list(b"#")]
    wanted = greedy(prompts)
    with make_engine(cache=cache) as engine:
        params = SamplingParams(max_tokens=24, ignore_eos=True)
        first = engine.generate([prompts[0]], params)
        before = engine.stats().scheduled_tokens
        others = engine.generate(prompts[1:], params)
        stats = engine.stats()
    assert [tokens_of(output) for output in first + others] == wanted
    hit = 192
    assert [output.usage.cached_tokens for output in others] == [hit, hit]
    prompt_tokens = sum(len(prompt) - hit for prompt in prompts[1:])
    assert stats.scheduled_tokens - before == prompt_tokens + 2 * 23
    assert (stats.prefix_hits, stats.cached_tokens) == (2, 2 * hit)


@pytest.mark.parametrize(
    "cache", [{"name": "align", "block_size": 16}, {"name": "all", "block_size": 64}]
)
def test_a_fully_cached_prompt_still_runs_its_last_token(cache):
    prompt = list(TEXT[:128])
    wanted = greedy([prompt])
    with make_engine(cache=cache) as engine:
        params = SamplingParams(max_tokens=24, ignore_eos=True)
        for nth in range(2):
            output = engine.generate([prompt], params)[0]
            assert [tokens_of(output)] == wanted
            hit = 128 - cache["block_size"]
            assert output.usage.cached_tokens == (hit if nth else 0)


def test_a_state_is_published_only_at_the_boundary_it_stands_at():
    """Two prefills share a budget: a chunk that ends in mid-block is no boundary."""
    prompts = [list(TEXT[:40]), list(TEXT[100:140])]
    wanted = greedy(prompts)
    sections = {
        "cache": {"name": "align", "block_size": 16},
        "engine": {"max_num_batched_tokens": 24},
    }
    with make_engine(**sections) as engine:
        params = SamplingParams(max_tokens=24, ignore_eos=True)
        for _ in range(3):
            outputs = engine.generate(prompts, params)
            assert [tokens_of(output) for output in outputs] == wanted


def test_no_hit_after_the_state_was_evicted():
    prompts = [list(TEXT[start : start + 60]) for start in (0, 50, 100, 150)]
    wanted = greedy(prompts)
    cache = {"name": "align", "block_size": 16, "memory": f"{5 * SLOT_BYTES} B"}
    with make_engine(cache=cache, engine={"max_num_seqs": 1}) as engine:
        params = SamplingParams(max_tokens=24, ignore_eos=True)
        for _ in range(2):
            outputs = engine.generate(prompts, params)
            assert [tokens_of(output) for output in outputs] == wanted
        assert engine.stats().evictions > 0


@pytest.mark.parametrize(
    "decode", [{"name": "baseline"}, {"name": "replay-torch", "buffer_len": 7}]
)
@pytest.mark.parametrize(("name", "block_size"), [("align", 8), ("all", 64)])
def test_preempted_requests_give_the_same_tokens(alone, decode, name, block_size):
    ring = 0 if decode["name"] == "baseline" else 8 * 7 * (8 * 64 + 8 + 64) * 4
    slots = 6 if name == "align" else 7
    cache = {
        "name": name,
        "block_size": block_size,
        "memory": f"{slots * (SLOT_BYTES + ring)} B",
    }
    budget = {"max_num_batched_tokens": 40 if name == "align" else 130}
    with make_engine(cache=cache, decode=decode, engine=budget) as engine:
        outputs = engine.generate(PROMPTS, SamplingParams(max_tokens=24, ignore_eos=True))
        assert [tokens_of(output) for output in outputs] == alone
        assert engine.stats().preemptions > 0
        assert_idle(engine)


@pytest.mark.parametrize("steps", [0, 1, 2, 10])
def test_cancelling_frees_everything(steps):
    with make_engine(engine={"max_num_seqs": 2, "max_num_batched_tokens": 50}) as engine:
        params = SamplingParams(max_tokens=100, ignore_eos=True)
        names = [engine.add_request(prompt, params) for prompt in PROMPTS[4:]]
        for _ in range(steps):
            engine.step()
        for name in names[:3]:
            assert engine.cancel(name)
        assert not engine.cancel(names[0])
        outputs = {}
        while engine.has_work:
            outputs |= {e.request_id: e.output for e in engine.step() if e.output is not None}
        assert [outputs[name].finish_reason for name in names] == ["cancelled"] * 3 + ["length"]
        assert_idle(engine)


def test_one_bad_request_does_not_stop_the_others(alone):
    with make_engine() as engine:
        prompts = [PROMPTS[0], [], [257], [True], [1.5], "", PROMPTS[1], list(range(100)) * 6, 7]
        outputs = engine.generate(prompts, SamplingParams(max_tokens=24, ignore_eos=True))
    assert [tokens_of(outputs[at]) for at in (0, 6)] == alone[:2]
    errors = {at: output.error for at, output in enumerate(outputs) if output.error}
    assert errors.keys() == {1, 2, 3, 4, 5, 7, 8}
    assert "empty" in errors[1]
    assert "257" in errors[2]
    assert "600 tokens" in errors[7]
    assert "511" in errors[7]


def test_a_prompt_that_leaves_room_for_one_token_runs():
    prompt = prompts_of(511)[0]
    with make_engine() as engine:
        output = engine.generate([prompt], SamplingParams(max_tokens=None))[0]
        assert (len(output.token_ids), output.finish_reason) == (1, "length")
        with pytest.raises(RequestError, match="512 tokens"):
            engine.add_request([*prompt, 1])


def test_stop_tokens_and_stop_texts_end_the_output():
    with make_engine() as engine:
        whole = engine.generate([TEXT.decode()], SamplingParams(max_tokens=60, ignore_eos=True))[0]
        stop = whole.text[10:14]
        cut = whole.text.index(stop)
        stopped = engine.generate([TEXT.decode()], SamplingParams(max_tokens=60, stop=[stop]))[0]
        assert (stopped.text, stopped.finish_reason) == (whole.text[:cut], "stop")
        token = whole.token_ids[5]
        first = whole.token_ids.index(token)
        params = SamplingParams(max_tokens=60, stop_token_ids=[token])
        ended = engine.generate([TEXT.decode()], params)[0]
        assert ended.token_ids == whole.token_ids[: first + 1]
        assert ended.text == whole.text[:first]


def test_streamed_text_and_tokens_add_up_to_the_output():
    params = SamplingParams(max_tokens=40, stop=["zzz", "self.items.append"])
    with make_engine() as engine:
        texts: dict[str, str] = {}
        tokens: dict[str, list[int]] = {}
        outputs = {}
        for event in engine.stream(["class Stack:\n", "def push("], params):
            texts[event.request_id] = texts.get(event.request_id, "") + event.text
            tokens.setdefault(event.request_id, []).extend(event.token_ids)
            if event.output is not None:
                outputs[event.request_id] = event.output
        plain = engine.generate(["class Stack:\n", "def push("], params)
    assert [texts[name] for name in outputs] == [output.text for output in outputs.values()]
    assert [tuple(tokens[name]) for name in outputs] == [o.token_ids for o in outputs.values()]
    by_prompt = {output.prompt: output.text for output in outputs.values()}
    assert by_prompt == {output.prompt: output.text for output in plain}


def test_leaving_a_stream_early_cancels_it():
    with make_engine() as engine:
        for event in engine.stream(["def main():"], SamplingParams(max_tokens=100)):
            if event.token_ids:
                break
        del event
        engine.step()
        assert_idle(engine)


def test_a_seed_gives_the_same_tokens_whatever_else_runs():
    params = SamplingParams(max_tokens=24, temperature=0.9, top_k=40, top_p=0.95, seed=11)
    with make_engine() as engine:
        alone = engine.generate([PROMPTS[4]], params)[0]
        others = [SamplingParams(max_tokens=30, temperature=1.0, seed=s) for s in range(7)]
        crowd = engine.generate(
            [*PROMPTS[:4], PROMPTS[4], *PROMPTS[5:]], [*others[:4], params, *others[4:]]
        )
        again = engine.generate([PROMPTS[4]], SamplingParams(max_tokens=24, temperature=0.9))[0]
    assert crowd[4].token_ids == alone.token_ids
    assert alone.seed == 11
    assert again.seed != 11


def test_logprobs_are_those_of_the_model():
    with make_engine() as engine:
        output = engine.generate(["def main("], SamplingParams(max_tokens=5, logprobs=3))[0]
    assert len(output.logprobs) == len(output.token_ids) == 5
    for token, entry in zip(output.token_ids, output.logprobs, strict=True):
        assert entry.token_id == token
        assert entry.top[0] == (token, entry.logprob)
        assert len(entry.top) == 3
        assert sorted((score for _, score in entry.top), reverse=True) == [s for _, s in entry.top]
        assert entry.logprob <= 0


def test_times_and_counts_are_told():
    with make_engine() as engine:
        output = engine.generate(["def main("], SamplingParams(max_tokens=5, ignore_eos=True))[0]
        timing = output.timing
        assert timing.arrival <= timing.first_scheduled <= timing.first_token <= timing.finished
        assert (output.usage.prompt_tokens, output.usage.completion_tokens) == (9, 5)
        assert engine.stats().generated_tokens == 5


def test_a_pool_too_small_for_one_request_is_refused_with_what_would_do():
    with pytest.raises(CapacityError, match=rf"at least {2 * SLOT_BYTES} bytes"):
        make_engine(cache={"name": "none", "memory": f"{2 * SLOT_BYTES - 1} B"})
    engine = make_engine(cache={"name": "none", "memory": f"{2 * SLOT_BYTES} B"})
    assert engine.stats().total_slots == 1
    assert engine.pool.nbytes == 2 * SLOT_BYTES


def test_predicted_bytes_are_the_allocated_ones():
    engine = make_engine(decode={"name": "replay-torch", "buffer_len": 5})
    layers = [engine.pool.layer(index) for index in range(8)]
    allocated = sum(tensor.nbytes for layer in layers for tensor in layer.values())
    assert allocated == engine.pool.nbytes


def test_combinations_that_cannot_run_are_refused_before_a_model_is_loaded():
    with pytest.raises(CombinationError, match=r"block_size = 100.*max_num_batched_tokens = 50"):
        make_engine(
            cache={"name": "align", "block_size": 100}, engine={"max_num_batched_tokens": 50}
        )
    with pytest.raises(CombinationError, match=r"block_size = 48.*chunk size = 64"):
        make_engine(cache={"name": "all", "block_size": 48})


def test_16_bit_states_stay_close():
    params = SamplingParams(max_tokens=1, logprobs=0)
    prompt = TEXT[:100].decode()
    scores = {}
    for dtype in ("float32", "float16", "bfloat16"):
        with make_engine(
            cache={"state_dtype": dtype}, engine={"max_num_batched_tokens": 7}
        ) as engine:
            scores[dtype] = engine.generate([prompt], params)[0].logprobs[0].logprob
    assert abs(scores["float16"] - scores["float32"]) < 0.01
    assert abs(scores["bfloat16"] - scores["float32"]) < 0.1


def test_what_runs_is_described():
    lines = "\n".join(make_engine().describe())
    assert "decode baseline" in lines
    assert "64 slots" in lines
    assert quickstart().tokenizer.has_text
