"""`ssmcore plugins`: which strategies are installed, and what each can be told."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ssmcore.cli.option_types import type_in_words
from ssmcore.cli.options import ConfigOption, JsonOption, SetOption, load_settings
from ssmcore.errors import SsmcoreError, UnknownStrategyError
from ssmcore.strategies import SLOTS

if TYPE_CHECKING:
    from ssmcore.registry import Registered, Registry
    from ssmcore.settings import Settings

app = typer.Typer(no_args_is_help=True, help="List and describe installed strategies.")


@app.command("list")
def list_(config: ConfigOption = None, set_: SetOption = None, as_json: JsonOption = False) -> None:
    """List every strategy: slot, name, distribution, whether it runs here, which is selected."""
    from ssmcore.registry import Registry

    registry = Registry.load()
    settings = load_settings(config, set_)
    device = _device(settings.engine.device)
    selected = _selected(settings, registry)
    rows = []
    for slot in SLOTS:
        for entry in registry.records(slot):
            reason = entry.unavailable(device)
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
    if as_json:
        broken = [
            {
                "name": plugin.name,
                "distribution": plugin.distribution,
                "version": plugin.version,
                "error": plugin.error,
            }
            for plugin in registry.broken
        ]
        typer.echo(json.dumps({"device": device, "strategies": rows, "broken": broken}, indent=2))
        return
    from ssmcore.cli.tables import print_table

    print_table(
        ("slot", "name", "distribution", f"runs here ({device})", "selected"),
        [
            (
                str(row["slot"]),
                str(row["name"]),
                f"{row['distribution']} {row['version']}",
                "yes" if row["available"] else f"no: {row['reason']}",
                "*" if row["selected"] else "",
            )
            for row in rows
        ],
    )
    for plugin in registry.broken:
        typer.echo(str(plugin))


def _device(setting: str) -> str:
    from ssmcore.device import resolve_device

    try:
        return resolve_device(setting).partition(":")[0]
    except SsmcoreError:
        return setting.partition(":")[0]


def _selected(settings: Settings, registry: Registry) -> dict[str, str]:
    """The name per slot that would run here; what was named where that cannot run."""
    from ssmcore.selection import select

    try:
        return dict(select(settings, registry, running=True).names)
    except SsmcoreError:
        names = {slot: getattr(settings, slot).name for slot in SLOTS}
        return {slot: name for slot, name in names.items() if name is not None}


@app.command()
def show(
    name: Annotated[str, typer.Argument(help="Name of a strategy.")],
    slot: Annotated[
        str | None,
        typer.Option(
            "--slot",
            help="Only that of one slot: classifier, cache, decode or graph.",
            show_default=False,
        ),
    ] = None,
    config: ConfigOption = None,
    set_: SetOption = None,
    as_json: JsonOption = False,
) -> None:
    """Describe a strategy: what it does, its options with types, defaults and help.

    A name that several slots have is described for each of them.
    """
    from ssmcore.registry import Registry

    registry = Registry.load()
    device = _device(load_settings(config, set_).engine.device)
    described = [_description(*entry, device) for entry in _named(registry, name, slot)]
    if as_json:
        typer.echo(json.dumps(described, indent=2, default=str))
        return
    for strategy in described:
        _print_description(strategy)


def _print_description(strategy: dict[str, Any]) -> None:
    from ssmcore.cli.tables import print_table

    slot = strategy["slot"]
    typer.secho(f"{slot} {strategy['name']}", bold=True, nl=False)
    typer.echo(f"  {strategy['distribution']} {strategy['version']}")
    typer.echo(strategy["summary"])
    if strategy["results"]:
        typer.echo(f"results: {strategy['results']}")
    if strategy["reason"]:
        typer.echo(f"cannot run on {strategy['device']} here: {strategy['reason']}")
    if not strategy["options"]:
        typer.echo("It has no options.")
        return
    print_table(
        ("option", "type", "default", "help"),
        [
            (
                f"{slot}.{option['name']}",
                option["type"],
                "required" if option["required"] else json.dumps(option["default"], default=str),
                option["help"],
            )
            for option in strategy["options"]
        ],
    )


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
        known = {entry.record.name for where in slots for entry in registry.records(where)}
        broken = "".join(f"\n{plugin}" for plugin in registry.broken)
        raise UnknownStrategyError(f"no strategy is named {name!r}{nearest(name, known)}{broken}")
    return found


def _description(slot: str, entry: Registered, device: str) -> dict[str, Any]:
    record = entry.record
    schema = record.options.model_json_schema()
    definitions = schema.get("$defs", {})
    options = [
        {
            "name": key,
            "type": type_in_words(option, definitions),
            "default": option.get("default"),
            "required": key in schema.get("required", ()),
            "help": option.get("description", ""),
        }
        for key, option in schema.get("properties", {}).items()
    ]
    reason = entry.unavailable(device)
    return {
        "slot": slot,
        "name": record.name,
        "summary": record.summary,
        "distribution": entry.distribution,
        "version": entry.version,
        "device": device,
        "available": reason is None,
        "reason": reason,
        "results": _results(entry) if slot == "decode" else None,
        "options": options,
    }


def _results(entry: Registered) -> str:
    """What a decode algorithm says of its results, as far as it can be asked."""
    from ssmcore.strategies import CreateContext, Limits

    strategy: Any = entry.record.create
    try:
        strategy = entry.record.create(entry.record.options(), CreateContext(Limits()))
    except Exception:  # it needs options, or fails: ask its class
        if not hasattr(strategy, "exact"):
            return "unknown without its options"
    if strategy.exact:
        return "exact: the same tokens as the plain recurrence in float32"
    return f"relative error of at most {strategy.error_bound:g} against float64"
