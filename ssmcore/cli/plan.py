"""`ssmcore plan`: plans of recorded or hand-written steps, as JSON or explained; needs no model."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ssmcore.cli.options import ConfigOption, SetOption

if TYPE_CHECKING:
    from rich.table import Table

    from ssmcore.cases import Planner
    from ssmcore.explain import StepStory
    from ssmcore.jsonlines import Line

STDIN = Path("-")

_HEADINGS = (
    "row",
    "class",
    "why",
    "tokens",
    "conv read",
    "state read",
    "writes",
    "cursor",
    "flush",
)


def plan(
    step: Annotated[
        Path | None,
        typer.Argument(
            metavar="[STEP]",
            help="File with one step case as JSON; nothing or - reads standard input.",
            show_default=False,
        ),
    ] = None,
    cases: Annotated[
        Path | None,
        typer.Option(
            "--cases",
            metavar="FILE.jsonl",
            help="Plan every line of a file (- reads standard input) and print one plan a line.",
            show_default=False,
        ),
    ] = None,
    explain: Annotated[
        bool, typer.Option("--explain", help="Print a table that explains the plan.")
    ] = False,
    config: ConfigOption = None,
    set_: SetOption = None,
) -> None:
    """Print the plan of a step, without a model and without a GPU.

    A case is {"id": ..., "settings": {...}, "step": {...}}. Its settings stand above --config and
    below --set; ssmcore.toml and the environment are not read. The exit status is 1 if a case was
    refused, 2 if the file could not be read.
    """
    from ssmcore.cases import Planner

    if step is not None and cases is not None:
        raise typer.BadParameter("give either one STEP or --cases, not both")
    planner = Planner.with_defaults(config, set_ or ())
    lines = _lines(cases) if cases is not None else _whole(step or STDIN)
    refused = False
    for line in lines:
        refused |= _explain(planner, line) if explain else _print(planner, line)
    sys.stdout.flush()
    if refused:
        raise typer.Exit(1)


def _lines(path: Path) -> Iterator[Line]:
    """The lines of a file or of standard input; ends with status 2 if it cannot be read."""
    from ssmcore.jsonlines import read_lines

    try:
        if path == STDIN:
            yield from read_lines(sys.stdin.buffer)
            return
        with path.open("rb") as stream:
            yield from read_lines(stream)
    except OSError as error:
        typer.echo(f"error: cannot read {path}: {error.strerror or error}", err=True)
        raise typer.Exit(2) from None


def _whole(path: Path) -> Iterator[Line]:
    """All lines of a file as one case."""
    from ssmcore.jsonlines import MAX_LINE_BYTES, Line

    pieces: list[bytes] = []
    size = 0
    for line in _lines(path):
        size += MAX_LINE_BYTES if line.data is None else len(line.data)
        if size >= MAX_LINE_BYTES:
            yield Line(1, None)
            return
        pieces.append(line.data or b"")
    yield Line(1, b"\n".join(pieces))


def _print(planner: Planner, line: Line) -> bool:
    """Print the answer to one case; whether it was refused."""
    from ssmcore.jsonlines import dump_line

    answer = planner.answer(line)
    sys.stdout.write(dump_line(answer) + "\n")
    return "error" in answer


def _explain(planner: Planner, line: Line) -> bool:
    """Print one case's plan in words; whether it was refused."""
    from rich.console import Console

    from ssmcore.explain import explain

    answer = planner.answer(line, show=explain)
    console = Console(markup=False, highlight=False)
    if not console.is_terminal:
        console = Console(markup=False, highlight=False, width=200)
    name = answer["id"]
    title = "case" if name is None else f"case {name}"
    error = answer.get("error")
    if error is not None:
        console.print(f"{title} is refused ({error['code']}): {error['message']}", soft_wrap=True)
        return True
    console.print(title)
    for sentence in answer["plan"].lines:
        console.print(f"  {sentence}", soft_wrap=True)
    console.print(_table(answer["plan"]))
    return False


def _table(story: StepStory) -> Table:
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD)
    for heading in _HEADINGS:
        table.add_column(heading)
    for row in story.rows:
        table.add_row(
            row.row,
            row.kind,
            row.why,
            row.tokens,
            row.conv_read,
            row.state_read,
            row.writes,
            row.cursor,
            row.flush,
        )
    return table
