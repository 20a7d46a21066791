"""Ctrl-C between steps: the first asks long work to end cleanly, the second ends it at once."""

from __future__ import annotations

import signal
import threading
from types import FrameType, TracebackType

INTERRUPTED = 130
"""Exit status after Ctrl-C, as shells have it."""


class Interrupt:
    """While entered, `wanted` tells that Ctrl-C was pressed; a second one raises as usual."""

    def __init__(self) -> None:
        self.wanted = False
        self._previous: signal._HANDLER = None
        self._installed = False

    def __enter__(self) -> Interrupt:
        if threading.current_thread() is threading.main_thread():
            self._previous = signal.signal(signal.SIGINT, self._pressed)
            self._installed = True
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._installed:
            signal.signal(signal.SIGINT, self._previous)
            self._installed = False

    def _pressed(self, number: int, frame: FrameType | None) -> None:
        if self.wanted:
            raise KeyboardInterrupt
        self.wanted = True
