"""Many prompts through one engine: answers come in the order of the prompts, as soon as they can.

Prompts are taken from their source only as fast as the engine works, so a file of any length goes
through in bounded memory.
"""

from __future__ import annotations

import queue
import threading
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ssmcore.cli.prompts import PromptRequest
from ssmcore.engine.requests import RequestOutput
from ssmcore.errors import RequestError

if TYPE_CHECKING:
    from ssmcore.engine.engine import Engine

_LEAST_HELD = 256
_READ_AHEAD = 64
_LONGEST_WAIT = 0.1


@dataclass(slots=True, eq=False)
class Answer:
    """What became of one prompt: its output, or why there is none.

    Attributes:
        index: its place among the prompts, from 0.
    """

    index: int
    request: PromptRequest
    output: RequestOutput | None = None
    error: str | None = None

    @property
    def done(self) -> bool:
        """Whether nothing more is to come."""
        return self.output is not None or self.error is not None


class _Feed:
    """Reads a source in a thread of its own, so that a slow one does not hold up what runs."""

    def __init__(self, source: Iterator[PromptRequest]) -> None:
        self._queue: queue.Queue[PromptRequest | BaseException | None] = queue.Queue(_READ_AHEAD)
        self.at_end = False
        threading.Thread(target=self._read, args=(source,), daemon=True).start()

    def _read(self, source: Iterator[PromptRequest]) -> None:
        try:
            for request in source:
                self._queue.put(request)
        except BaseException as error:  # goes on in the thread that takes
            self._queue.put(error)
        else:
            self._queue.put(None)

    def take(self, *, wait: bool) -> PromptRequest | None:
        """The next prompt; None if there is none yet (after a short wait, if asked) or no more."""
        if self.at_end:
            return None
        try:
            found = self._queue.get(block=wait, timeout=_LONGEST_WAIT)
        except queue.Empty:
            return None
        if isinstance(found, BaseException):
            self.at_end = True
            raise found
        self.at_end = found is None
        return found


class Batch:
    """Runs prompts to their end.

    Args:
        stop: asked between steps; once it says so, nothing is sent any more and what runs is
            cancelled, its tokens so far being its output.
        on_text: told of new text, with the prompt's index; only then are texts streamed.
        on_step: called after each step.
    """

    def __init__(
        self,
        engine: Engine,
        source: Iterator[PromptRequest],
        *,
        stop: Callable[[], bool] = lambda: False,
        on_text: Callable[[int, str], None] | None = None,
        on_step: Callable[[], None] = lambda: None,
    ) -> None:
        self._engine = engine
        self._feed = _Feed(source)
        self._stop = stop
        self._on_text = on_text
        self._on_step = on_step
        self._held: deque[Answer] = deque()
        self._running: dict[str, Answer] = {}
        self._most_held = max(_LEAST_HELD, 4 * engine.settings.engine.max_num_seqs)
        self._taken = 0

    def answers(self) -> Iterator[Answer]:
        """Answers in the order of the prompts."""
        while True:
            stopped = self._stop()
            if not stopped:
                self._take()
            else:
                self._cancel()
            yield from self._finished()
            if self._running:
                self._step()
            elif stopped or self._feed.at_end:
                return

    def _take(self) -> None:
        while len(self._held) < self._most_held:
            request = self._feed.take(wait=not self._held)
            if request is None:
                return
            answer = Answer(self._taken, request)
            self._taken += 1
            self._held.append(answer)
            self._send(answer)

    def _send(self, answer: Answer) -> None:
        request = answer.request
        if request.error is not None:
            answer.error = str(request.error)
            return
        try:
            request_id = self._engine.add_request(
                request.prompt, request.params, stream=self._on_text is not None
            )
        except RequestError as error:
            answer.error = str(error)
        else:
            self._running[request_id] = answer

    def _step(self) -> None:
        for event in self._engine.step():
            answer = self._running[event.request_id]
            if event.text and self._on_text is not None:
                self._on_text(answer.index, event.text)
            if event.output is not None:
                self._end(event.request_id, event.output)
        self._on_step()

    def _end(self, request_id: str, output: RequestOutput) -> None:
        answer = self._running.pop(request_id)
        if output.error is not None:
            answer.error = output.error
        else:
            answer.output = output

    def _cancel(self) -> None:
        for request_id in list(self._running):
            self._engine.cancel(request_id)

    def _finished(self) -> Iterator[Answer]:
        while self._held and self._held[0].done:
            yield self._held.popleft()
