from __future__ import annotations

import json

import pytest

from ssmcore.bench.metrics import (
    Measurements,
    RequestRecord,
    StepSample,
    distribution,
    summarise,
    time_per_output_token,
)


def record(**changes) -> RequestRecord:
    values = {
        "index": 0,
        "arrival": 1.0,
        "first_scheduled": 1.5,
        "first_token": 2.0,
        "finished": 5.0,
        "prompt_tokens": 100,
        "cached_tokens": 25,
        "output_tokens": 4,
        "preemptions": 0,
    }
    return RequestRecord(**values | changes)


def test_percentiles_are_linear_between_values():
    found = distribution(range(101))
    assert found == {"mean": 50, "p50": 50, "p90": 90, "p99": 99, "max": 100}
    assert distribution([1, 2])["p90"] == pytest.approx(1.9)


def test_nothing_measured_has_no_distribution():
    assert distribution([]) is None


def test_time_per_output_token_counts_from_the_first_token():
    assert time_per_output_token(record()) == pytest.approx(1.0)
    assert time_per_output_token(record(output_tokens=1)) is None
    assert time_per_output_token(record(first_token=None)) is None


def test_the_summary_counts_served_requests_only():
    measured = Measurements(planned=4, sent=3, seconds=2.0, total_slots=9, complete=False)
    measured.requests += [
        record(),
        record(prompt_tokens=300, cached_tokens=0, preemptions=2),
        record(error="too long", first_token=None, output_tokens=0),
    ]
    measured.steps.append(StepSample(1.0, 0.5, 4, 3, 20, 4, 1, 5, 2))
    summary = summarise(measured)
    assert summary["requests"] == {"planned": 4, "sent": 3, "finished": 2, "refused": 1}
    assert summary["throughput"] == {
        "requests_per_s": 1.0,
        "prompt_tokens_per_s": 200.0,
        "generated_tokens_per_s": 4.0,
    }
    assert summary["time_to_first_token_s"]["p50"] == pytest.approx(1.0)
    assert summary["queueing_s"]["max"] == pytest.approx(0.5)
    assert summary["cache"] == {
        "hit_rate": 25 / 400,
        "tokens_saved": 25,
        "requests_with_hits": 1,
        "evictions": 0,
        "preemptions": 2,
    }
    assert summary["steps"]["rows"]["mean"] == 4
    assert summary["slots"]["total"] == 9


def test_a_summary_of_nothing_is_strict_json():
    summary = summarise(Measurements(planned=1))
    assert json.loads(json.dumps(summary, allow_nan=False))["time_to_first_token_s"] is None
