"""Start of the engine for a command: what is in force goes to standard error, a line each."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import typer

if TYPE_CHECKING:
    from ssmcore.engine.engine import Engine
    from ssmcore.registry import Registry
    from ssmcore.settings import Settings


def start_engine(
    settings: Settings, *, quiet: bool = False, registry: Registry | None = None
) -> Engine:
    """Load the model and start; says what is in force unless `quiet`.

    Raises:
        SsmcoreError: the model, a strategy or the memory asked for is not to be had.
    """
    from ssmcore.engine.engine import Engine

    engine = Engine(settings, registry, progress=None if quiet else _say_capture)
    if not quiet:
        for line in engine.describe():
            typer.echo(line, err=True)
    return engine


def _say_capture(done: int, total: int) -> None:
    """Count captured graphs in one line of a terminal; what they took is told afterwards."""
    if sys.stderr.isatty():
        typer.echo(f"\rcapturing graphs: {done} of {total}", err=True, nl=done == total)
