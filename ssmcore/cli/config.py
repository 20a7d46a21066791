"""`ssmcore config`: what is in force, whether it can run here, and the schema of it all."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import typer

from ssmcore.cli.options import ConfigOption, JsonOption, SetOption, load_settings
from ssmcore.errors import SsmcoreError

if TYPE_CHECKING:
    from ssmcore.settings import Settings
    from ssmcore.strategies import Selection

app = typer.Typer(no_args_is_help=True, help="Show and check settings.")


@app.command()
def show(config: ConfigOption = None, set_: SetOption = None, as_json: JsonOption = False) -> None:
    """Print every value in force and where it came from."""
    settings = load_settings(config, set_)
    selection, problem = _selection_here(settings)
    rows = _rows(settings, selection)
    notes = list(selection.notes) if selection is not None else []
    if as_json:
        values = [{"key": key, "value": value, "source": source} for key, value, source in rows]
        typer.echo(json.dumps({"settings": values, "notes": notes, "problem": problem}, indent=2))
        return
    from rich.console import Console
    from rich.table import Table

    table = Table("setting", "value", "source", title="Settings in force", title_justify="left")
    for key, value, source in rows:
        table.add_row(key, json.dumps(value), source)
    console = Console()
    console.print(table)
    for note in notes:
        console.print(f"note: {note}", markup=False)
    if problem:
        console.print(f"cannot run here: {problem}", markup=False)


def _rows(settings: Settings, selection: Selection | None) -> list[tuple[str, Any, str]]:
    """Key, value and source of every setting, the chosen strategies' defaults included."""
    from ssmcore.registry import Registry
    from ssmcore.selection import STATIC_DECODE
    from ssmcore.strategies import SLOTS

    registry = Registry.load()
    values = settings.effective()
    known = dict(values)
    for slot in SLOTS:
        name = getattr(settings, slot).name
        if name is None:
            name = selection.names[slot] if selection is not None else STATIC_DECODE
        options = registry.get(slot, name).record.options
        for key, field in options.model_fields.items():
            known.setdefault(f"{slot}.{key}", field.get_default())
        for key in getattr(settings, slot).options:
            if key not in options.model_fields:
                del known[f"{slot}.{key}"]
    return [(key, known[key], settings.source_of(key)) for key in sorted(known, key=_section)]


def _section(key: str) -> tuple[int, bool, str]:
    from ssmcore.settings_sources import SECTIONS

    section, _, name = key.partition(".")
    return SECTIONS.index(section), name != "name", name


def _selection_here(settings: Settings) -> tuple[Selection | None, str | None]:
    """The strategies that would run here, or why they cannot."""
    from ssmcore.device import resolve_device
    from ssmcore.registry import Registry
    from ssmcore.selection import select

    registry = Registry.load()
    plain = select(settings, registry)
    try:
        device = resolve_device(settings.engine.device).partition(":")[0]
        return select(settings, registry, running=True, device=device), None
    except SsmcoreError as error:
        return plain, str(error)


@app.command()
def check(config: ConfigOption = None, set_: SetOption = None) -> None:
    """Say whether these settings can run on this machine; exit status 1 if not."""
    from ssmcore.device import resolve_device
    from ssmcore.registry import Registry
    from ssmcore.selection import select

    settings = load_settings(config, set_)
    device = resolve_device(settings.engine.device)
    selection = select(settings, Registry.load(), running=True, device=device.partition(":")[0])
    for note in selection.notes:
        typer.echo(f"note: {note}")
    names = ", ".join(f"{slot} {name}" for slot, name in selection.names.items())
    typer.echo(f"ok: {names}, on {device}")


@app.command()
def schema() -> None:
    """Print the JSON schema of the configuration file, with every installed plugin's options."""
    from ssmcore.registry import Registry
    from ssmcore.schema import configuration_schema

    typer.echo(json.dumps(configuration_schema(Registry.load()), indent=2))
