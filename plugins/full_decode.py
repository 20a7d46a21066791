"""Graph padding `full-decode`: whole decode steps are captured at a few row counts.

Sizes are 1, 2, 4, 8 and then every multiple of 8 up to 64, of 16 up to 256, of 32 beyond, and the
limit itself: padding costs at most a few rows, and there are few graphs to capture.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator

from pydantic import Field as Option

from ssmcore.hookspecs import hookimpl
from ssmcore.strategies import (
    Conflict,
    CreateContext,
    Field,
    GraphPaddingRecord,
    Selection,
    StrategyOptions,
)


class FullDecodeOptions(StrategyOptions):
    """Options of `full-decode`."""

    max_capture_size: int = Option(default=256, ge=1, le=2**20, strict=True)
    """Most rows a graph is captured for; `engine.max_num_seqs` limits it too."""


class FullDecode:
    """Pads decode steps to the next captured row count."""

    fields: tuple[Field, ...] = ()

    def __init__(self, options: FullDecodeOptions, context: CreateContext) -> None:
        self.sizes = capture_sizes(min(options.max_capture_size, context.limits.max_num_seqs))

    def check(self, selection: Selection) -> Conflict | None:
        """Lives with every strategy."""
        return None

    def padded_rows(self, num_rows: int) -> int | None:
        """The least captured row count that holds the step, None if there is none."""
        at = bisect_left(self.sizes, num_rows)
        return self.sizes[at] if at < len(self.sizes) else None


def capture_sizes(most: int) -> tuple[int, ...]:
    """Row counts to capture, ascending, the last of them `most`."""
    sizes = {1, 2, 4, most, *range(8, 65, 8), *range(80, 257, 16), *range(288, most + 1, 32)}
    return tuple(sorted(size for size in sizes if size <= most))


@hookimpl
def ssmcore_graph_paddings() -> Iterator[GraphPaddingRecord]:
    """Offer `full-decode`."""
    yield GraphPaddingRecord(
        name="full-decode",
        summary="Captures whole decode steps as CUDA graphs at a few row counts.",
        options=FullDecodeOptions,
        create=FullDecode,
    )
