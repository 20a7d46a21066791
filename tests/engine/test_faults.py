"""What goes wrong in or between steps: Ctrl-C, memory, numbers that are none, others' requests."""

from __future__ import annotations

import pytest
from engine_builders import SLOT_BYTES, TEXT, assert_idle, greedy, make_engine, quickstart

from ssmcore.engine.engine import Engine
from ssmcore.engine.requests import SamplingParams
from ssmcore.errors import RequestError
from ssmcore.settings import Settings

PARAMS = SamplingParams(max_tokens=24, ignore_eos=True)
PROMPT = list(TEXT[:60])


def outputs_of(engine: Engine) -> dict:
    """Run to the end; every output by its request's id."""
    outputs = {}
    while engine.has_work:
        outputs |= {e.request_id: e.output for e in engine.step() if e.output is not None}
    return outputs


def break_off(engine: Engine, monkeypatch, error: BaseException) -> None:
    """Let the next step fail once its states are written."""

    def fail(hidden):
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(engine.model, "logits", fail)
        with pytest.raises(type(error)):
            engine.step()


@pytest.mark.parametrize("error", [KeyboardInterrupt(), MemoryError("no more")])
@pytest.mark.parametrize(
    "cache",
    [{"name": "none"}, {"name": "align", "block_size": 16}, {"name": "all", "block_size": 64}],
)
@pytest.mark.parametrize(
    "decode", [{"name": "baseline"}, {"name": "replay-torch", "buffer_len": 5}]
)
def test_a_step_that_was_broken_off_changes_no_token(monkeypatch, error, cache, decode):
    prompts = [PROMPT, list(TEXT[70:77])]
    wanted = greedy(prompts)
    with make_engine(cache=cache, decode=decode, engine={"max_num_batched_tokens": 40}) as engine:
        names = [engine.add_request(prompt, PARAMS) for prompt in prompts]
        for steps in (0, 1, 3, 9):
            for _ in range(steps):
                engine.step()
            break_off(engine, monkeypatch, error)
        outputs = outputs_of(engine)
        assert [outputs[name].token_ids for name in names] == wanted
        assert_idle(engine)


@pytest.mark.parametrize("cache", [{"name": "none"}, {"name": "align", "block_size": 16}])
def test_a_step_with_drafts_that_was_broken_off_changes_no_token(monkeypatch, cache):
    prompt = list(b"a = 1\nb = 2\na = 1\nb = 2\na = 1\n")
    wanted = greedy([prompt], max_tokens=40)
    with make_engine(cache=cache, engine={"num_spec_tokens": 3}) as engine:
        name = engine.add_request(prompt, SamplingParams(max_tokens=40, ignore_eos=True))
        for steps in (1, 2, 3, 4):
            for _ in range(steps):
                engine.step()
            break_off(engine, monkeypatch, KeyboardInterrupt())
        assert [outputs_of(engine)[name].token_ids] == wanted
        assert engine.stats().accepted_drafts > 0
        assert_idle(engine)


def test_an_end_that_was_to_be_told_is_told_after_a_step_that_was_broken_off(monkeypatch):
    with make_engine() as engine:
        names = [engine.add_request(PROMPT, PARAMS) for _ in range(2)]
        engine.step()
        engine.cancel(names[0])
        break_off(engine, monkeypatch, KeyboardInterrupt())
        outputs = outputs_of(engine)
    assert [outputs[name].finish_reason for name in names] == ["cancelled", "length"]


def test_breaking_off_generate_leaves_only_the_requests_of_others(monkeypatch):
    with make_engine() as engine:
        other = engine.add_request(PROMPT, PARAMS)

        def fail(hidden):
            raise KeyboardInterrupt

        with monkeypatch.context() as patch:
            patch.setattr(engine.model, "logits", fail)
            with pytest.raises(KeyboardInterrupt):
                engine.generate([PROMPT, PROMPT], PARAMS)
        outputs = outputs_of(engine)
        assert list(outputs) == [other]
        assert [outputs[other].token_ids] == greedy([PROMPT])


def test_generate_keeps_the_events_of_others_for_the_next_step():
    with make_engine() as engine:
        other = engine.add_request(PROMPT, SamplingParams(max_tokens=2), stream=True)
        engine.generate([PROMPT], PARAMS)
        events = engine.step()
        assert {event.request_id for event in events} == {other}
        assert sum(len(event.token_ids) for event in events) == 2
        assert events[-1].output is not None


def test_two_streams_take_turns():
    prompts = ["def push(", "class Stack:\n"]
    with make_engine() as engine:
        wanted = [output.text for output in engine.generate(prompts, PARAMS)]
        streams = [engine.stream(prompt, PARAMS) for prompt in prompts]
        texts = ["", ""]
        left = {0, 1}
        while left:
            for number in sorted(left):
                event = next(streams[number], None)
                if event is None:
                    left.discard(number)
                else:
                    texts[number] += event.text
        assert texts == wanted


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("options", [{}, {"temperature": 1.0, "top_p": 0.9}, {"logprobs": 2}])
def test_logits_that_are_no_numbers_end_the_request_with_an_error(monkeypatch, bad, options):
    with make_engine() as engine:
        real = engine.model.logits

        def spoil(hidden):
            logits = real(hidden).clone()
            logits[0] = bad
            return logits

        monkeypatch.setattr(engine.model, "logits", spoil)
        params = SamplingParams(max_tokens=1, ignore_eos=True, **options)
        outputs = engine.generate([PROMPT, PROMPT[:-1]], params)
        assert [output.finish_reason for output in outputs] == ["error", "length"]
        assert "not finite" in outputs[0].error
        assert outputs[0].token_ids == ()
        assert_idle(engine)


def test_stop_texts_without_a_tokenizer_are_refused():
    settings = Settings.from_dict({"engine": {"device": "cpu", "max_model_len": 64}})
    with Engine(settings, model=quickstart().model) as engine:
        with pytest.raises(RequestError, match="stop_token_ids"):
            engine.add_request([1, 2], SamplingParams(stop=["x"]))
        with pytest.raises(RequestError, match="token ids"):
            engine.add_request("text")
        output = engine.generate([[1, 2]], SamplingParams(max_tokens=3))[0]
        assert (len(output.token_ids), output.text) == (3, "")


def test_more_logprobs_than_tokens_are_refused():
    with (
        make_engine() as engine,
        pytest.raises(RequestError, match=r"logprobs = 400 is more than the 257"),
    ):
        engine.add_request(PROMPT, SamplingParams(logprobs=400))


def test_memory_that_was_asked_for_is_taken_where_states_are_reused():
    memory = f"{40 * SLOT_BYTES} B"
    rows = {"max_num_seqs": 2}
    kept = make_engine(cache={"name": "align", "block_size": 512, "memory": memory}, engine=rows)
    assert kept.stats().total_slots == 39
    plain = make_engine(cache={"name": "none", "memory": memory}, engine=rows)
    assert plain.stats().total_slots == 2
