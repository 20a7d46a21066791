"""Every place where a plugin can extend ssmcore, on one page.

A plugin is a module (or object) named by an entry point of the group `ssmcore`; it implements any
of these hooks with `@ssmcore.hookimpl`. Each hook returns records; none is called after start-up
but the observers, and those only when a plugin listens.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import pluggy

from ssmcore.strategies import (
    BatchClassifierRecord,
    CacheModeRecord,
    DecodeAlgorithmRecord,
    GraphPaddingRecord,
)

if TYPE_CHECKING:
    from ssmcore.observers import Observer

PROJECT = "ssmcore"

hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)


@hookspec
def ssmcore_batch_classifiers() -> Iterable[BatchClassifierRecord]:  # type: ignore[empty-body]
    """Offer ways to split a step into decodes and prefills.

    Example:

        import ssmcore
        from ssmcore.strategies import BatchClassifierRecord, StrategyOptions

        class AllPrefill:
            def __init__(self, options, context): ...
            def num_decodes(self, rows): return 0
            def check(self, selection): return None

        @ssmcore.hookimpl
        def ssmcore_batch_classifiers():
            yield BatchClassifierRecord("all-prefill", "Runs every row as a prefill.",
                                        StrategyOptions, AllPrefill)
    """


@hookspec
def ssmcore_cache_modes() -> Iterable[CacheModeRecord]:  # type: ignore[empty-body]
    """Offer ways to lay out a request's states over the columns of its block table."""


@hookspec
def ssmcore_decode_algorithms() -> Iterable[DecodeAlgorithmRecord]:  # type: ignore[empty-body]
    """Offer algorithms for one decode step of the recurrence."""


@hookspec
def ssmcore_graph_paddings() -> Iterable[GraphPaddingRecord]:  # type: ignore[empty-body]
    """Offer choices of the row counts that CUDA graphs are captured for."""


@hookspec
def ssmcore_observers() -> Iterable[Observer]:  # type: ignore[empty-body]
    """Offer objects that are told of every planned and every run step."""
