"""Prompt-lookup drafting: what followed the last few tokens when they stood here before.

Costs nothing on the model's side, and pays where text repeats itself, as code and quotations do.
Source: prompt-lookup decoding (n-gram matching over the request's own tokens).
"""

from __future__ import annotations

from collections.abc import Sequence

LENGTHS = (4, 3, 2)
"""Lengths of the n-grams that are looked for, the longest first."""


class NgramIndex:
    """Where each n-gram of a request's tokens was last followed by something.

    Args:
        tokens: the request's tokens; the list may grow, and must not change otherwise.
    """

    __slots__ = ("_indexed", "_positions", "_tokens")

    def __init__(self, tokens: Sequence[int]) -> None:
        self._tokens = tokens
        self._positions: dict[tuple[int, ...], int] = {}
        self._indexed = 0

    def draft(self, count: int) -> list[int]:
        """Up to `count` tokens that may come next; [] if the last ones never stood here."""
        tokens = self._tokens
        self._index()
        for length in LENGTHS:
            if len(tokens) > length:
                at = self._positions.get(tuple(tokens[-length:]))
                if at is not None:
                    return list(tokens[at : at + count])
        return []

    def _index(self) -> None:
        """Index n-grams that have something behind them."""
        tokens = self._tokens
        for end in range(max(self._indexed, 1), len(tokens)):
            for length in LENGTHS:
                if end >= length:
                    self._positions[tuple(tokens[end - length : end])] = end
        self._indexed = len(tokens)
