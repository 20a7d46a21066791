"""`ssmcore plugins`: which strategies are installed, and what each can be told."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ssmcore.cli.options import ConfigOption, JsonOption, SetOption, load_settings
from ssmcore.errors import SsmcoreError, UnknownStrategyError
from ssmcore.strategies import SLOTS

if TYPE_CHECKING:
    from ssmcore.registry import Registered, Registry

app = typer.Typer(no_args_is_help=True, help="List and describe installed strategies.")


@app.command("list")
def list_(config: ConfigOption = None, set_: SetOption = None, as_json: JsonOption = False) -> None:
    """List every strategy: slot, name, distribution, whether it runs here, which is selected."""
    from ssmcore.registry import Registry

    registry = Registry.load()
    settings = load_settings(config, set_)
    device = _device(settings.engine.device)
    selected = _selected(settings, registry, device)
    rows = []
    for slot in SLOTS:
        for entry in registry.records(slot):
            reason = entry.record.unavailable(device)
            rows.append(
                {
                    "slot": slot,
                    "name": entry.record.name,
                    "summary": entry.record.summary,
                    "distribution": entry.distribution,
                    "version": entry.version,
                    "available": reason is None,
                    "reason": reason,
                    "selected": selected.get(slot) == entry.record.name,
                }
            )
    broken = [
        {"name": plugin.name, "distribution": plugin.distribution, "error": plugin.error}
        for plugin in registry.broken
    ]
    if as_json:
        typer.echo(json.dumps({"device": device, "strategies": rows, "broken": broken}, indent=2))
        return
    from rich.console import Console
    from rich.table import Table

    table = Table("slot", "name", "distribution", f"runs here ({device})", "selected")
    for row in rows:
        table.add_row(
            row["slot"],
            row["name"],
            f"{row['distribution']} {row['version']}",
            "yes" if row["available"] else f"no: {row['reason']}",
            "*" if row["selected"] else "",
        )
    console = Console()
    console.print(table)
    for plugin in broken:
        console.print(
            f"plugin {plugin['name']!r} of {plugin['distribution']} could not be imported:"
            f" {plugin['error']}",
            markup=False,
        )


def _device(setting: str) -> str:
    from ssmcore.device import resolve_device

    try:
        return resolve_device(setting).partition(":")[0]
    except SsmcoreError:
        return setting.partition(":")[0]


def _selected(settings: Any, registry: Registry, device: str) -> dict[str, str]:
    """The name per slot that would run here; what was named where they cannot run."""
    from ssmcore.selection import select

    try:
        return dict(select(settings, registry, running=True, device=device).names)
    except SsmcoreError:
        names = {slot: getattr(settings, slot).name for slot in SLOTS}
        return {slot: name for slot, name in names.items() if name is not None}


@app.command()
def show(
    name: Annotated[str, typer.Argument(help="Name of a strategy.")],
    slot: Annotated[
        str | None, typer.Option("--slot", help="classifier, cache, decode or graph.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Describe a strategy: what it does, its options with types, defaults and help."""
    from ssmcore.registry import Registry

    registry = Registry.load()
    entries = _named(registry, name, slot)
    if as_json:
        typer.echo(json.dumps([_description(*entry) for entry in entries], indent=2))
        return
    from rich.console import Console
    from rich.table import Table

    console = Console()
    for where, entry in entries:
        described = _description(where, entry)
        console.print(f"[bold]{where} {name}[/bold]  {described['distribution']}")
        console.print(described["summary"], markup=False)
        if described["unavailable"]:
            console.print(f"cannot run here: {described['unavailable']}", markup=False)
        if described["options"]:
            table = Table("option", "type", "default", "help")
            for option in described["options"]:
                table.add_row(
                    f"{where}.{option['name']}",
                    option["type"],
                    json.dumps(option["default"]),
                    option["help"],
                )
            console.print(table)
        else:
            console.print("It has no options.")


def _named(registry: Registry, name: str, slot: str | None) -> list[tuple[str, Registered]]:
    if slot is not None and slot not in SLOTS:
        raise UnknownStrategyError(f"--slot {slot!r}: must be one of {', '.join(SLOTS)}")
    found: list[tuple[str, Registered]] = [
        (where, entry)
        for where in SLOTS
        if slot in (None, where)
        for entry in registry.records(where)
        if entry.record.name == name
    ]
    if not found:
        from ssmcore.naming import nearest

        slots = SLOTS if slot is None else (slot,)
        known = {entry.record.name for where in slots for entry in registry.records(where)}  # type: ignore[arg-type]
        raise UnknownStrategyError(f"no strategy is named {name!r}{nearest(name, known)}")
    return found


def _description(slot: str, entry: Registered) -> dict[str, Any]:
    record = entry.record
    schema = record.options.model_json_schema()
    options = [
        {
            "name": key,
            "type": _type(option),
            "default": option.get("default"),
            "help": option.get("description", ""),
        }
        for key, option in schema.get("properties", {}).items()
    ]
    return {
        "slot": slot,
        "name": record.name,
        "summary": record.summary,
        "distribution": f"{entry.distribution} {entry.version}".strip(),
        "unavailable": record.unavailable(_device("auto")),
        "options": options,
    }


def _type(option: dict[str, Any]) -> str:
    """A type as a person says it, bounds included."""
    if "anyOf" in option:
        return " or ".join(_type(part) for part in option["anyOf"])
    if "enum" in option:
        return " | ".join(str(value) for value in option["enum"])
    text = str(option.get("type", "any"))
    low, high = option.get("minimum"), option.get("maximum")
    if low is not None and high is not None:
        return f"{text}, {low} to {high}"
    return text if low is None else f"{text}, at least {low}"
