"""Replay of a workload against the engine: send each request when it is due, step, measure.

Open loop at a multiple of the trace's own speed: requests are due when the trace says, however busy
the engine is, and waiting counts from then. At full speed the next request is sent, in the trace's
order, as soon as the engine has a row for it, and waiting counts from there.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from ssmcore.bench.metrics import Measurements, RequestRecord, StepSample
from ssmcore.bench.workload import Item, PromptMaker, Workload
from ssmcore.engine.requests import RequestOutput, SamplingParams
from ssmcore.errors import RequestError
from ssmcore.hookspecs import hookimpl

if TYPE_CHECKING:
    from ssmcore.engine.engine import Engine
    from ssmcore.observers import Observer
    from ssmcore.plan import StepPlan

_LONGEST_NAP = 0.05
_LIVE_STEPS = 50


class StepWatch:
    """A plugin and observer in one: keeps what the last step was; the engine tells it."""

    def __init__(self) -> None:
        self.rows = self.decodes = self.tokens = 0
        self.seconds = 0.0

    @hookimpl
    def ssmcore_observers(self) -> list[Observer]:
        """Offer itself."""
        return [self]

    def step_planned(self, plan: StepPlan) -> None:
        """Nothing: only steps that ran count."""

    def step_run(self, plan: StepPlan, seconds: float) -> None:
        """Keep the step's sizes; padding rows do not count."""
        padding = plan.num_reqs - plan.rows.num_real
        self.rows = plan.num_reqs - padding
        self.decodes = plan.num_decodes - padding
        self.tokens = plan.num_decode_tokens + plan.num_prefill_tokens
        self.seconds = seconds


class Replay:
    """One replay; `run` fills `measured` and may be cut short between two steps.

    Args:
        engine: with `watch` among its observers.
        speed: multiple of the trace's speed; None sends as fast as the engine takes requests.
        clock, sleep: for tests.
    """

    def __init__(
        self,
        engine: Engine,
        watch: StepWatch,
        workload: Workload,
        prompts: PromptMaker,
        *,
        speed: float | None,
        clock: Callable[[], float] = time.perf_counter,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.engine = engine
        self.workload = workload
        self.measured = Measurements(planned=len(workload.items))
        self._watch = watch
        self._prompts = prompts
        self._speed = speed
        self._clock = clock
        self._sleep = sleep
        self._start = 0.0
        self._items = workload.items
        self._next = 0  # the first that is not sent
        self._ahead = 0  # the first that is not due
        self._sent: dict[str, tuple[Item, float]] = {}
        rows = engine.settings.engine.max_num_seqs
        self._most_sent = rows if speed is None else 2 * rows

    @property
    def in_flight(self) -> int:
        """Requests sent and not finished."""
        return len(self._sent)

    def run(
        self,
        stop: Callable[[], bool] = lambda: False,
        after_step: Callable[[], None] = lambda: None,
    ) -> Measurements:
        """Replay until every request is finished or `stop` says so; what runs then is cancelled."""
        measured = self.measured
        measured.total_slots = self.engine.stats().total_slots
        self._start = self._clock()
        while (self._unsent() or self._sent) and not stop():
            self._send()
            if self._sent:
                self._step()
            elif self._unsent():
                self._wait()
            after_step()
        measured.seconds = self._now()
        measured.evictions = self.engine.stats().evictions
        measured.complete = not self._unsent() and not self._sent
        for request_id in self._sent:
            self.engine.cancel(request_id)
        return measured

    def live(self) -> str:
        """How it goes, in a line: what runs, waits, and the rate of the last steps."""
        steps = self.measured.steps[-_LIVE_STEPS:]
        if not steps:
            return "waiting for the first request"
        last = steps[-1]
        seconds = last.finished - steps[0].finished + steps[0].seconds
        tokens = sum(step.tokens for step in steps)
        rate = f"{tokens / seconds:.0f} tokens/s" if seconds > 0 else ""
        return f"{last.running} run, {last.waiting} wait, {last.slots} slots, {rate}"

    def _unsent(self) -> bool:
        return self._next < len(self._items)

    def _now(self) -> float:
        return self._clock() - self._start

    def _arrival(self, item: Item) -> float:
        """When a request is due, in seconds since the start."""
        return self._now() if self._speed is None else item.arrival / self._speed

    def _wait(self) -> None:
        until = self._arrival(self._items[self._next]) - self._now()
        if until > 0:
            self._sleep(min(until, _LONGEST_NAP))

    def _send(self) -> None:
        """Hand over what is due; what the engine could not start on soon is kept back."""
        while self._unsent() and len(self._sent) < self._most_sent:
            item = self._items[self._next]
            arrival = self._arrival(item)
            if arrival > self._now():
                return
            self._next += 1
            self.measured.sent += 1
            params = SamplingParams(max_tokens=item.output_tokens, ignore_eos=True)
            try:
                request_id = self.engine.add_request(self._prompts.tokens(item), params)
            except RequestError as error:
                self._refused(item, arrival, error)
            else:
                self._sent[request_id] = (item, arrival)

    def _refused(self, item: Item, arrival: float, error: RequestError) -> None:
        self.measured.requests.append(
            RequestRecord(
                item.request.index, arrival, None, None, self._now(), 0, 0, 0, 0, str(error)
            )
        )

    def _step(self) -> None:
        for event in self.engine.step():
            if event.output is not None:
                self._finished(event.output)
        stats = self.engine.stats()
        watch = self._watch
        self.measured.steps.append(
            StepSample(
                finished=self._now(),
                seconds=watch.seconds,
                rows=watch.rows,
                decodes=watch.decodes,
                tokens=watch.tokens,
                running=stats.running,
                waiting=stats.waiting + self._overdue(),
                slots=stats.used_slots,
                cached=stats.cached_slots,
            )
        )

    def _overdue(self) -> int:
        """Requests that are due and not sent yet."""
        if self._speed is None:
            return 0
        now = self._now()
        self._ahead = max(self._ahead, self._next)
        while self._ahead < len(self._items) and self._arrival(self._items[self._ahead]) <= now:
            self._ahead += 1
        return self._ahead - self._next

    def _finished(self, output: RequestOutput) -> None:
        item, arrival = self._sent.pop(output.request_id)
        timing = output.timing
        self.measured.requests.append(
            RequestRecord(
                index=item.request.index,
                arrival=arrival,
                first_scheduled=self._since(timing.first_scheduled),
                first_token=self._since(timing.first_token),
                finished=self._since(timing.finished) or self._now(),
                prompt_tokens=output.usage.prompt_tokens,
                cached_tokens=output.usage.cached_tokens,
                output_tokens=output.usage.completion_tokens,
                preemptions=output.preemptions,
                error=output.error,
            )
        )

    def _since(self, moment: float | None) -> float | None:
        return None if moment is None else moment - self._start
