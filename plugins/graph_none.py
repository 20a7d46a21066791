"""Graph padding `none`: no graphs, every step runs eagerly at its own size."""

from __future__ import annotations

from collections.abc import Iterator

from ssmcore.hookspecs import hookimpl
from ssmcore.strategies import (
    Conflict,
    CreateContext,
    Field,
    GraphPaddingRecord,
    Selection,
    StrategyOptions,
)


class NoGraphs:
    """Captures nothing."""

    fields: tuple[Field, ...] = ()
    sizes: tuple[int, ...] = ()

    def __init__(self, options: StrategyOptions, context: CreateContext) -> None:
        pass

    def check(self, selection: Selection) -> Conflict | None:
        """Lives with every strategy."""
        return None

    def padded_rows(self, num_rows: int) -> int | None:
        """Always eager."""
        return None


@hookimpl
def ssmcore_graph_paddings() -> Iterator[GraphPaddingRecord]:
    """Offer `none`."""
    yield GraphPaddingRecord(
        name="none",
        summary="No CUDA graphs; steps run eagerly at their own size.",
        options=StrategyOptions,
        create=NoGraphs,
    )
