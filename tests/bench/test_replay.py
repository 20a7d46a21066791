"""The loop alone, on an engine made of numbers and a clock that only steps and naps move."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from ssmcore.bench.replay import Replay, StepWatch
from ssmcore.bench.workload import PromptMaker, make_workload
from ssmcore.engine.requests import RequestOutput, StreamEvent, Timing, Usage
from ssmcore.errors import RequestError
from ssmcore.traces import Trace, TraceRequest

STEP_SECONDS = 1.0


class Clock:
    def __init__(self) -> None:
        self.time = 100.0

    def __call__(self) -> float:
        return self.time

    def sleep(self, seconds: float) -> None:
        self.time += seconds


class ToyEngine:
    """One token per running request and step, a step takes a second; prompts cost nothing."""

    def __init__(self, clock: Clock, rows: int = 2) -> None:
        self.clock = clock
        self.rows = rows
        self.settings = SimpleNamespace(engine=SimpleNamespace(max_num_seqs=rows))
        self.requests: dict[str, dict] = {}
        self.cancelled: list[str] = []
        self.most_held = 0

    def add_request(self, prompt, params):
        if len(prompt) == 7:
            raise RequestError("seven is not served")
        request_id = f"r{len(self.requests) + len(self.cancelled)}-{self.clock.time}-{id(prompt)}"
        self.requests[request_id] = {
            "prompt": prompt,
            "left": params.max_tokens,
            "total": params.max_tokens,
            "arrival": self.clock.time,
            "scheduled": None,
            "first": None,
        }
        self.most_held = max(self.most_held, len(self.requests))
        return request_id

    def step(self):
        running = list(self.requests.items())[: self.rows]
        for _, request in running:
            request["scheduled"] = request["scheduled"] or self.clock.time
        self.clock.time += STEP_SECONDS
        events = []
        for request_id, request in running:
            request["left"] -= 1
            request["first"] = request["first"] or self.clock.time
            if request["left"]:
                continue
            del self.requests[request_id]
            timing = Timing(
                request["arrival"], request["scheduled"], request["first"], self.clock.time
            )
            usage = Usage(len(request["prompt"]), request["total"], 0)
            output = RequestOutput(request_id, None, (), "", (), "length", usage, timing)
            events.append(StreamEvent(request_id, "", (), output=output))
        return events

    def stats(self):
        held = len(self.requests)
        running = min(held, self.rows)
        return SimpleNamespace(
            running=running,
            waiting=held - running,
            used_slots=running,
            cached_slots=0,
            total_slots=self.rows,
            evictions=0,
        )

    def cancel(self, request_id):
        del self.requests[request_id]
        self.cancelled.append(request_id)


def replay_of(*requests: tuple[float, int, int], speed: float | None, rows: int = 2):
    trace = Trace(
        "made up",
        "azure",
        tuple(TraceRequest(at, *request) for at, request in enumerate(requests)),
    )
    clock = Clock()
    engine = ToyEngine(clock, rows)
    workload = make_workload(trace, max_model_len=1000)
    replay = Replay(
        engine,
        StepWatch(),
        workload,
        PromptMaker(256),
        speed=speed,
        clock=clock,
        sleep=clock.sleep,
    )
    return replay, engine


def test_requests_arrive_at_the_traces_times_and_wait_from_then():
    replay, _ = replay_of((0, 5, 4), (0.5, 5, 1), (20, 5, 1), speed=1, rows=1)
    measured = replay.run()
    first, second, third = measured.requests
    assert measured.complete
    assert (first.arrival, first.first_token, first.finished) == (0, 1, 4)
    assert (second.arrival, second.first_scheduled) == (0.5, 4)
    assert third.arrival == 20
    assert third.first_scheduled == pytest.approx(20, abs=0.06)


def test_speed_divides_the_traces_times():
    replay, _ = replay_of((0, 5, 1), (20, 5, 1), speed=10)
    assert [record.arrival for record in replay.run().requests] == [0, 2]


def test_full_speed_keeps_the_rows_full_and_sends_in_order():
    replay, engine = replay_of(*((1000.0 * at, 5, 3) for at in range(6)), speed=None)
    measured = replay.run()
    assert measured.seconds == 9
    assert engine.most_held == 2
    assert [record.index for record in measured.requests] == list(range(6))
    assert all(record.first_scheduled == record.arrival for record in measured.requests)


def test_an_overload_is_counted_as_waiting_and_not_piled_up_in_the_engine():
    replay, engine = replay_of(*((0.0, 5, 2) for _ in range(50)), speed=1, rows=2)
    measured = replay.run()
    assert engine.most_held == 4
    assert measured.steps[0].waiting == 48
    assert max(record.first_scheduled - record.arrival for record in measured.requests) == 48


def test_a_refused_request_is_recorded_and_the_others_go_on():
    replay, _ = replay_of((0, 5, 1), (0, 7, 1), (0, 5, 1), speed=None)
    measured = replay.run()
    assert [record.error for record in measured.requests] == ["seven is not served", None, None]
    assert measured.complete


def test_a_stopped_replay_keeps_what_was_measured_and_cancels_the_rest():
    replay, engine = replay_of(*((0.0, 5, 2) for _ in range(6)), speed=None)
    measured = replay.run(stop=lambda: len(replay.measured.requests) >= 2)
    assert not measured.complete
    assert len(measured.requests) == 2
    assert measured.sent == 2 + len(engine.cancelled)
    assert engine.requests == {}
