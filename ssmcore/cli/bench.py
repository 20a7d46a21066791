"""`ssmcore bench`: measurements of the engine; `bench trace` replays a serving trace."""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ssmcore.cli.options import ConfigOption, JsonOption, SetOption, load_settings
from ssmcore.errors import SettingsError

if TYPE_CHECKING:
    from ssmcore.bench.replay import Replay
    from ssmcore.bench.workload import Workload

app = typer.Typer(no_args_is_help=True, help="Measure the engine.")

_REFRESH = 0.2


@app.callback()
def _bench_group() -> None: ...


@app.command()
def trace(
    trace: Annotated[
        Path,
        typer.Argument(
            metavar="TRACE",
            help="Azure's CSV (TIMESTAMP, ContextTokens, GeneratedTokens) or Mooncake's JSON lines"
            " (timestamp, input_length, output_length, hash_ids).",
        ),
    ],
    limit: Annotated[
        int | None,
        typer.Option(min=1, help="Replay only the first N requests.", show_default=False),
    ] = None,
    speed: Annotated[
        str,
        typer.Option(
            metavar="X|max",
            help="Multiple of the trace's own speed; max sends each request as soon as the engine"
            " has room for it.",
        ),
    ] = "1",
    max_prompt: Annotated[
        int | None,
        typer.Option(min=1, help="Cap prompts at N tokens; the model's limit always holds."),
    ] = None,
    max_output: Annotated[
        int | None,
        typer.Option(min=1, help="Cap outputs at N tokens; the model's limit always holds."),
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Of the made-up prompts.")] = 0,
    as_json: JsonOption = False,
    plot: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE.png",
            help="Draw latencies and load (extra: plot).",
            show_default=False,
        ),
    ] = None,
    quiet: Annotated[
        bool, typer.Option("--quiet", "-q", help="Nothing on standard error but errors.")
    ] = False,
    config: ConfigOption = None,
    set_: SetOption = None,
) -> None:
    """Replay a serving trace against the engine and measure.

    Prompts are made up with the trace's lengths and shared prefixes; outputs have the trace's
    lengths. Times count from when a request was due. Ctrl-C ends the replay and prints what was
    measured so far, with exit status 130.
    """
    from ssmcore.bench.machine import command_line, machine_facts
    from ssmcore.bench.metrics import summarise
    from ssmcore.bench.plot import check_plot, save_plot
    from ssmcore.bench.replay import Replay, StepWatch
    from ssmcore.bench.workload import PromptMaker, make_workload
    from ssmcore.cli.interrupt import INTERRUPTED, Interrupt
    from ssmcore.cli.startup import start_engine
    from ssmcore.registry import Registry
    from ssmcore.traces import read_trace

    factor = _speed(speed)
    if plot is not None:
        check_plot(plot)
    requests = read_trace(trace, limit)
    settings = load_settings(config, set_)
    workload = make_workload(
        requests,
        max_model_len=settings.engine.max_model_len,
        max_prompt=max_prompt,
        max_output=max_output,
    )
    watch = StepWatch()
    registry = Registry.load()
    registry.register(watch, name="bench")
    engine = start_engine(settings, quiet=quiet, registry=registry)
    if not quiet:
        for line in describe(workload, factor):
            typer.echo(line, err=True)
    replay = Replay(engine, watch, workload, PromptMaker(engine.vocab_size, seed), speed=factor)
    with Interrupt() as interrupt, _progress(replay, quiet) as refresh:
        measured = replay.run(stop=lambda: interrupt.wanted, after_step=refresh)
    summary = summarise(measured)
    report = {
        "command": command_line(),
        "trace": _trace_facts(workload, limit, speed, seed),
        "engine": engine.facts(),
        "machine": machine_facts(),
        **summary,
    }
    if as_json:
        typer.echo(json.dumps(report, indent=2, allow_nan=False))
    else:
        said = not quiet and sys.stdout.isatty() and sys.stderr.isatty()
        _print(report, [] if said else describe(workload, factor))
    if plot is not None:
        save_plot(measured, f"{requests.name}, {engine.title}", plot)
        if not quiet:
            typer.echo(f"drawn to {plot}", err=True)
    if interrupt.wanted:
        raise typer.Exit(INTERRUPTED)


def _speed(text: str) -> float | None:
    """The multiple of the trace's speed, None for max."""
    if text == "max":
        return None
    try:
        factor = float(text)
    except ValueError:
        factor = math.nan
    if not 0 < factor < math.inf:
        raise SettingsError(f"--speed {text}: must be a number above 0, or max")
    return factor


def describe(workload: Workload, factor: float | None) -> list[str]:
    """What will be replayed, and what was changed about it, said before and kept after."""
    trace = workload.trace
    items = workload.items
    span = items[-1].arrival
    pace = "as fast as the engine takes them"
    if factor is not None:
        pace = f"over {span / factor:.0f} s ({factor:g} x the trace's speed)"
    lines = [f"{trace.name} ({trace.format}): {len(items)} requests {pace}"]
    capped = []
    if workload.prompts_capped:
        capped.append(f"{workload.prompts_capped} prompts")
    if workload.outputs_capped:
        capped.append(f"{workload.outputs_capped} outputs")
    limits = [f"engine.max_model_len = {workload.max_model_len}"]
    limits += [f"--max-prompt {workload.max_prompt}"] if workload.max_prompt else []
    limits += [f"--max-output {workload.max_output}"] if workload.max_output else []
    what = " and ".join(capped) if capped else "no request"
    lines.append(f"capped: {what} ({', '.join(limits)})")
    if workload.left_out:
        lines.append(f"left out: {workload.left_out} requests without prompt or output tokens")
    if trace.reordered:
        lines.append(f"sorted: {trace.reordered} requests stood behind one that came later")
    return lines


def _trace_facts(workload: Workload, limit: int | None, speed: str, seed: int) -> dict[str, Any]:
    trace = workload.trace
    return {
        "name": trace.name,
        "format": trace.format,
        "limit": limit,
        "speed": speed,
        "seed": seed,
        "requests": len(workload.items),
        "span_s": workload.items[-1].arrival,
        "max_model_len": workload.max_model_len,
        "max_prompt": workload.max_prompt,
        "max_output": workload.max_output,
        "prompts_capped": workload.prompts_capped,
        "outputs_capped": workload.outputs_capped,
        "left_out": workload.left_out,
        "reordered": trace.reordered,
    }


def _print(report: dict[str, Any], described: list[str]) -> None:
    from rich.console import Console

    from ssmcore.bench.report import rates, table_of

    console = Console(markup=False, highlight=False)
    for line in [*described, *rates(report)]:
        console.print(line, soft_wrap=True)
    console.print(table_of(report))


@contextmanager
def _progress(replay: Replay, quiet: bool) -> Iterator[Callable[[], None]]:
    """A bar with live figures on standard error, if that is a terminal."""
    if quiet or not sys.stderr.isatty():
        yield lambda: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

    with Progress(
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.description}"),
        console=Console(stderr=True),
        transient=True,
        redirect_stdout=False,
        redirect_stderr=False,
    ) as progress:
        task = progress.add_task("", total=len(replay.workload.items))
        shown = 0.0

        def refresh() -> None:
            nonlocal shown
            now = time.monotonic()
            if now - shown >= _REFRESH:
                shown = now
                progress.update(
                    task,
                    completed=len(replay.measured.requests),
                    description=replay.live(),
                )

        yield refresh
