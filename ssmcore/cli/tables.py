"""Tables on a terminal; cells are shown as they are, never read as markup."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


def print_table(
    columns: Sequence[str], rows: Iterable[Sequence[str]], title: str | None = None
) -> None:
    """Print rows of text under a header; long cells behind the first are folded."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(title=title, title_justify="left")
    for index, column in enumerate(columns):
        table.add_column(Text(column), overflow="fold", no_wrap=index == 0)
    for row in rows:
        table.add_row(*map(Text, row))
    Console().print(table)
