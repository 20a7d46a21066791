"""What the engine says of itself: counts, and sizes as a person reads them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class EngineStats:
    """Where the engine stands, and counts since it started.

    Attributes:
        running, waiting: requests.
        total_slots, used_slots, free_slots, cached_slots: of the pool, without the null slot;
            cached
            ones hold a state that others may start from and belong to nobody.
        steps, graph_steps: steps run, and those of them that replayed a graph.
        scheduled_tokens, generated_tokens: tokens run through the model, and sampled.
        prefix_queries, prefix_hits, cached_tokens: looks for a prefix, finds, and tokens not
            computed. preemptions, evictions: requests that made room, and cached states given up.
    """

    running: int
    waiting: int
    total_slots: int
    used_slots: int
    free_slots: int
    cached_slots: int
    steps: int
    graph_steps: int
    scheduled_tokens: int
    generated_tokens: int
    prefix_queries: int
    prefix_hits: int
    cached_tokens: int
    preemptions: int
    evictions: int
    drafted_tokens: int
    accepted_drafts: int


def readable_size(nbytes: int) -> str:
    """Bytes as a person says them."""
    size = float(nbytes)
    for unit in ("bytes", "KiB", "MiB"):
        if size < 1024:
            return f"{size:.0f} {unit}" if unit == "bytes" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} GiB"
