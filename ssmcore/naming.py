"""What a message says when a name is not known: the nearest one, and all there are."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches


def nearest(name: str, known: Iterable[str]) -> str:
    """`; did you mean ...?` and the known names, for the end of a message."""
    names = sorted(known)
    if not names:
        return "; there are none"
    close = get_close_matches(name, names, n=1, cutoff=0.5)
    hint = f"; did you mean {close[0]!r}?" if close else ";"
    return f"{hint} known: {', '.join(names)}"
