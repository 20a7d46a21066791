"""From token ids to text while they come: whole characters only, and nothing of a stop text.

`IncrementalDecoder` is what a tokenizer offers; this module adds stop texts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol


class IncrementalDecoder(Protocol):
    """Turns tokens into text as they come."""

    def push(self, token_id: int) -> str:
        """Text that this token completes; "" while a character is incomplete."""
        ...

    def flush(self) -> str:
        """What is left at the end, incomplete characters replaced."""
        ...


class TextStream:
    """Text of one request; holds back what may be the beginning of a stop text.

    Attributes:
        text: all that was given out.
        stopped: a stop text was met; nothing more comes.
    """

    __slots__ = ("_decoder", "_held", "_longest", "_parts", "_stops", "stopped")

    def __init__(self, decoder: IncrementalDecoder, stops: Sequence[str] = ()) -> None:
        self._decoder = decoder
        self._stops = tuple(stops)
        self._longest = max(map(len, self._stops), default=0)
        self._held = ""
        self._parts: list[str] = []
        self.stopped = False

    @property
    def text(self) -> str:
        """All text given out so far."""
        return "".join(self._parts)

    def push(self, token_id: int) -> str:
        """Add a token; returns the text that may be shown now."""
        return self._add(self._decoder.push(token_id))

    def finish(self) -> str:
        """Give out what was held back: no stop text came."""
        if self.stopped:
            return ""
        new = self._add(self._decoder.flush())
        held, self._held = ("", "") if self.stopped else (self._held, "")
        self._parts.append(held)
        return new + held

    def _add(self, text: str) -> str:
        if not text or self.stopped:
            return ""
        text = self._held + text
        found = min((at for stop in self._stops if (at := text.find(stop)) >= 0), default=-1)
        if found >= 0:
            self.stopped = True
            self._held = ""
            out = text[:found]
        else:
            held = self._may_begin(text)
            out = text[: len(text) - held]
            self._held = text[len(text) - held :]
        self._parts.append(out)
        return out

    def _may_begin(self, text: str) -> int:
        """Length of the longest end of `text` that a stop text begins with."""
        for length in range(min(self._longest - 1, len(text)), 0, -1):
            end = text[-length:]
            if any(stop.startswith(end) for stop in self._stops):
                return length
        return 0
