"""The matrix asks the registry: whatever is installed is a case, and a wrong strategy is caught."""

from __future__ import annotations

import dataclasses

import torch
from ssmcore_plugins.baseline import Baseline

from ssmcore import hookimpl
from ssmcore.registry import Registry
from ssmcore.strategies import SLOTS, Conflict, DecodeAlgorithmRecord, StrategyOptions
from ssmcore.testing.matrix import Case, Choice, Matrix, Refusal
from ssmcore.testing.runs import Outcome


class Forgetful(Baseline):
    """Loses a thousandth of the state at every step."""

    def update(self, inputs, slots, plan):
        y = super().update(inputs, slots, plan)
        state = slots["state"]
        state[plan.write_slots] *= 0.999
        return y


class Stubborn(Baseline):
    def check(self, selection):
        return Conflict("decode.name = 'stubborn'", "anything", "it will not", "another")


class Short(Baseline):
    def check(self, selection):
        if selection.mixer.activation_dtype == "bfloat16":
            return None
        return Conflict("decode.name = 'short'", "float32", "it is too long", "bfloat16")


class Plugin:
    @hookimpl
    def ssmcore_decode_algorithms(self):
        kinds = {"forgetful": Forgetful, "stubborn": Stubborn, "short": Short}
        for name, create in kinds.items():
            yield DecodeAlgorithmRecord(
                name=name, summary="for this test", options=StrategyOptions, create=create
            )


def plain(decode: str, **changes) -> Case:
    case = Case(
        classifier=Choice("decode-first"),
        cache=Choice("none"),
        decode=Choice(decode),
        graph=Choice("none"),
        dtype="float32",
        state_dtype="float32",
        budget=300,
        drafts=0,
    )
    return dataclasses.replace(case, **changes)


def test_every_registered_strategy_is_a_case(bench):
    cases = list(bench.matrix.cases())
    for slot in SLOTS:
        names = {entry.record.name for entry in bench.registry.records(slot)}
        assert {getattr(case, slot).name for case in cases} == names
    assert len(set(cases)) == len(cases) == len(set(map(str, cases)))


def test_a_strategy_that_loses_state_is_caught(bench, monkeypatch):
    registry = Registry.load()
    registry.register(Plugin())
    monkeypatch.setattr(bench, "registry", registry)
    monkeypatch.setattr(
        bench, "matrix", Matrix(registry, "cpu", bench.model.mixer_shape(), bench.chunk_size)
    )
    cases = list(bench.matrix.cases())
    assert {case.dtype for case in cases if case.decode.name == "forgetful"} == {"float32"}
    short = {case.dtype for case in cases if case.decode.name == "short"}
    assert short == {"float32", "bfloat16"}
    assert bench.run(plain("forgetful")).result == "wrong"
    refusal = bench.matrix.refusal(plain("stubborn"))
    assert refusal == Refusal((("decode.name = 'stubborn'", "it will not"),), ())
    assert refusal.kind == "impossible"
    assert refusal.explains(bench.error_of(plain("stubborn")))
    assert bench.error_of(plain("baseline")) is None


def test_logprobs_that_are_no_numbers_are_wrong():
    outcome = Outcome(
        tokens=9,
        differing=0,
        first_difference=None,
        logprob_error=1e-6,
        logprob_bound=1e-4,
        tokens_must_match=True,
        preemptions=0,
        prefix_hits=0,
        cached_tokens=0,
        graph_steps=0,
        steps=9,
        accepted_drafts=0,
        seconds=0.1,
    )
    assert outcome.result == "same"
    assert dataclasses.replace(outcome, differing=1).result == "wrong"
    assert dataclasses.replace(outcome, logprob_error=float("nan")).result == "wrong"
    bounded = dataclasses.replace(outcome, differing=1, tokens_must_match=False)
    assert bounded.result == "bounded"


def test_oracle_agrees_with_a_plain_forward(bench):
    """Log-probabilities of one token at a time are those of one prefill."""
    prompt, generated = bench.prompts[-1].tokens, bench.prompts[-1].expected[:5]
    (whole,) = bench.oracle.logprobs([(prompt, generated)])
    parts = [
        bench.oracle.logprobs([(prompt + generated[:at], generated[at : at + 1])])[0]
        for at in range(5)
    ]
    torch.testing.assert_close(whole, torch.cat(parts), rtol=0, atol=1e-9)
