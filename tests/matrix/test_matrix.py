"""Every registered combination: the same tokens, small errors, or a refusal with its reason.

python -m pytest tests/matrix                                  a pairwise cover, minutes
python -m pytest tests/matrix --full --shard 1/8               an eighth of the full product
python -m pytest tests/matrix --device cuda --matrix-json FILE on a GPU, results recorded
"""

from __future__ import annotations


def test_the_reference_is_beyond_rounding(bench):
    """No expected token is a near tie: float64 agrees with each, by far more than its error."""
    pairs = [(prompt.tokens, prompt.expected) for prompt in bench.prompts]
    assert bench.oracle.margin(pairs) > 1e-3


def test_refused_combination_is_refused_with_its_reason(bench, refused_case, record):
    refusal = bench.matrix.refusal(refused_case)
    entry = {"case": refused_case.as_dict(), "result": "failed", "reason": refusal.reason}
    record(entry)
    error = bench.error_of(refused_case)
    assert error is not None
    assert refusal.explains(error), error
    entry["result"] = refusal.kind


def test_combination_gives_the_same_tokens(bench, case, record):
    entry = {"case": case.as_dict(), "result": "failed"}
    record(entry)
    outcome = bench.run(case)
    entry |= outcome.as_dict() | {"result": "failed"}
    assert outcome.result != "wrong", outcome
    assert (outcome.preemptions > 0) == bench.can_preempt(case)
    assert outcome.prefix_hits > 0 or not bench.can_hit(case)
    assert outcome.prefix_hits == 0 or bench.matrix.selection(case).cache.reuses_states
    entry["result"] = outcome.result
