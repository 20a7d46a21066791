"""The Typer application: commands put together, errors turned into one clear message."""

from __future__ import annotations

import sys
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from ssmcore import __version__
from ssmcore.cli import bench, config, generate, plan, plugins
from ssmcore.errors import SsmcoreError


class _Commands(TyperGroup):
    """Prints an ssmcore error as one message and exits with status 1."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except SsmcoreError as error:
            if ctx.params.get("debug"):
                raise
            typer.secho("error: ", fg="red", bold=True, err=True, nl=False)
            typer.echo(str(error), err=True)
            raise typer.Exit(1) from None
        except KeyboardInterrupt:
            typer.echo("interrupted", err=True)
            raise typer.Exit(130) from None
        except BrokenPipeError:  # whoever read our output has left
            sys.stderr.close()
            raise typer.Exit(141) from None


app = typer.Typer(
    name="ssmcore",
    cls=_Commands,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="The open, pluggable core for serving Mamba-2 language models.",
)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"ssmcore {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version."
        ),
    ] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show tracebacks of errors.")] = False,
) -> None: ...


app.add_typer(config.app, name="config")
app.add_typer(plugins.app, name="plugins")
app.command("plan")(plan.plan)
app.command("generate")(generate.generate)
app.add_typer(bench.app, name="bench")
