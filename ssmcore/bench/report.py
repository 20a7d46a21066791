"""A replay's summary as a table for people; the JSON form is `ssmcore.bench.metrics`' own."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.table import Table

_COLUMNS = ("mean", "p50", "p90", "p99", "max")


def rates(summary: Mapping[str, Any]) -> list[str]:
    """Counts, rates, cache; a line each."""
    requests, tokens, cache = summary["requests"], summary["tokens"], summary["cache"]
    throughput = summary["throughput"]
    lines = [
        f"{requests['finished']} of {requests['planned']} requests finished in"
        f" {summary['seconds']:.1f} s"
        + (f", {requests['refused']} refused" if requests["refused"] else "")
        + ("" if summary["complete"] else "; ended early, these are the figures so far"),
    ]
    if throughput["requests_per_s"] is not None:
        lines.append(
            f"throughput: {throughput['requests_per_s']:.2f} requests/s,"
            f" {throughput['prompt_tokens_per_s']:.0f} prompt tokens/s,"
            f" {throughput['generated_tokens_per_s']:.0f} generated tokens/s"
            f" ({tokens['prompt']} and {tokens['generated']} tokens)"
        )
    hit_rate = cache["hit_rate"]
    rate = "none" if hit_rate is None else f"{100 * hit_rate:.1f} %"
    lines.append(
        f"prefix cache: hit rate {rate}, {cache['tokens_saved']} prompt tokens saved in"
        f" {cache['requests_with_hits']} requests, {cache['evictions']} evictions;"
        f" {cache['preemptions']} preemptions"
    )
    return lines


def table_of(summary: Mapping[str, Any]) -> Table:
    """Distributions: latencies with their units, then sizes."""
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD)
    table.add_column("measure")
    table.add_column("unit")
    for column in _COLUMNS:
        table.add_column(column, justify="right")
    for name, unit, values in _rows(summary):
        table.add_row(name, unit, *values)
    return table


def _rows(summary: Mapping[str, Any]) -> Iterator[tuple[str, str, list[str]]]:
    steps = summary["steps"]
    total = summary["slots"]["total"]
    for name, unit, scale, found in (
        ("time to first token", "ms", 1000, summary["time_to_first_token_s"]),
        ("time per output token", "ms", 1000, summary["time_per_output_token_s"]),
        ("queueing", "ms", 1000, summary["queueing_s"]),
        ("latency of a request", "s", 1, summary["latency_s"]),
        ("batch size", "requests", 1, steps["rows"]),
        ("decodes in a step", "requests", 1, steps["decode_rows"]),
        ("tokens in a step", "tokens", 1, steps["tokens"]),
        ("waiting", "requests", 1, steps["waiting"]),
        ("slots in use", f"of {total}", 1, summary["slots"]["in_use"]),
        ("slots cached", f"of {total}", 1, summary["slots"]["cached"]),
    ):
        if found is None:
            yield name, unit, ["-"] * len(_COLUMNS)
        else:
            yield name, unit, [_shown(scale * found[column]) for column in _COLUMNS]


def _shown(value: float) -> str:
    if value >= 1000:
        return f"{value:.0f}"
    return f"{value:.1f}" if value >= 10 else f"{value:.2f}"
