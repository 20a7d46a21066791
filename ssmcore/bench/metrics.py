"""What a replay measured, and its summary: rates, percentiles, batches, slots, cache.

Times are seconds of one clock (`time.perf_counter`), counted from the start of the replay.
Percentiles are NumPy's, linear between the two nearest values.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

PERCENTILES = (50, 90, 99)


@dataclass(frozen=True, slots=True)
class RequestRecord:
    """One finished request.

    Attributes:
        arrival: when the trace has it arrive (or when it was sent, at full speed).
        error: why it was not served, None if it was.
    """

    index: int
    arrival: float
    first_scheduled: float | None
    first_token: float | None
    finished: float
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    preemptions: int
    error: str | None = None


@dataclass(frozen=True, slots=True)
class StepSample:
    """The engine just after one step.

    Attributes:
        finished: time of the step's end; `seconds` it took.
        rows: requests in the step; `decodes` of them decode rows.
        tokens: tokens computed.
        running, waiting: requests that run and that wait.
        slots, cached: slots of the state pool in use, and those that only hold a reusable state.
    """

    finished: float
    seconds: float
    rows: int
    decodes: int
    tokens: int
    running: int
    waiting: int
    slots: int
    cached: int


@dataclass(slots=True)
class Measurements:
    """Everything measured, filled while the replay runs.

    Attributes:
        sent: requests handed to the engine.
        seconds: from the first arrival to the end.
        total_slots: slots of the pool that requests can use.
        evictions: reusable states given up for others.
        complete: all requests were finished; False after an interruption.
    """

    planned: int
    requests: list[RequestRecord] = field(default_factory=list)
    steps: list[StepSample] = field(default_factory=list)
    sent: int = 0
    seconds: float = 0.0
    total_slots: int = 0
    evictions: int = 0
    complete: bool = False


def distribution(values: Iterable[float]) -> dict[str, float] | None:
    """Mean, p50, p90, p99 and maximum; None of no values."""
    array = np.fromiter(values, dtype=np.float64)
    if not array.size:
        return None
    points = np.percentile(array, PERCENTILES).tolist()
    named = {f"p{at}": value for at, value in zip(PERCENTILES, points, strict=True)}
    return {"mean": float(array.mean()), **named, "max": float(array.max())}


def time_per_output_token(record: RequestRecord) -> float | None:
    """Seconds a token after the first; None of fewer than two tokens."""
    if record.first_token is None or record.output_tokens < 2:
        return None
    return (record.finished - record.first_token) / (record.output_tokens - 1)


def summarise(measured: Measurements) -> dict[str, Any]:
    """The summary as JSON values; times in seconds, as the keys say."""
    served = [record for record in measured.requests if record.error is None]
    prompt_tokens = sum(record.prompt_tokens for record in served)
    cached = sum(record.cached_tokens for record in served)
    generated = sum(record.output_tokens for record in served)
    seconds = measured.seconds

    def rate(count: int) -> float | None:
        return count / seconds if seconds > 0 else None

    return {
        "complete": measured.complete,
        "seconds": seconds,
        "requests": {
            "planned": measured.planned,
            "sent": measured.sent,
            "finished": len(served),
            "refused": len(measured.requests) - len(served),
        },
        "tokens": {"prompt": prompt_tokens, "generated": generated},
        "throughput": {
            "requests_per_s": rate(len(served)),
            "prompt_tokens_per_s": rate(prompt_tokens),
            "generated_tokens_per_s": rate(generated),
        },
        "time_to_first_token_s": distribution(
            record.first_token - record.arrival
            for record in served
            if record.first_token is not None
        ),
        "time_per_output_token_s": distribution(_present(map(time_per_output_token, served))),
        "queueing_s": distribution(
            record.first_scheduled - record.arrival
            for record in served
            if record.first_scheduled is not None
        ),
        "latency_s": distribution(record.finished - record.arrival for record in served),
        "steps": _steps(measured.steps),
        "slots": {
            "total": measured.total_slots,
            "in_use": distribution(step.slots for step in measured.steps),
            "cached": distribution(step.cached for step in measured.steps),
        },
        "cache": {
            "hit_rate": cached / prompt_tokens if prompt_tokens else None,
            "tokens_saved": cached,
            "requests_with_hits": sum(record.cached_tokens > 0 for record in served),
            "evictions": measured.evictions,
            "preemptions": sum(record.preemptions for record in served),
        },
    }


def _steps(steps: Sequence[StepSample]) -> dict[str, Any]:
    return {
        "count": len(steps),
        "seconds": sum(step.seconds for step in steps),
        "rows": distribution(step.rows for step in steps),
        "decode_rows": distribution(step.decodes for step in steps),
        "tokens": distribution(step.tokens for step in steps),
        "waiting": distribution(step.waiting for step in steps),
    }


def _present(values: Iterable[float | None]) -> Iterable[float]:
    return (value for value in values if value is not None)
