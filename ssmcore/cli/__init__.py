"""The command line: `ssmcore` and its commands, one module each.

Commands import what they need when they run, so that `--help` and planning never load torch.
"""

from __future__ import annotations

from ssmcore.cli.app import app

__all__ = ["app", "main"]


def main() -> None:
    """Entry point of the `ssmcore` program."""
    app()
