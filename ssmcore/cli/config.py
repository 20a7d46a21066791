"""`ssmcore config`: what is in force, whether it can run here, and the schema of it all."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import typer

from ssmcore.cli.options import ConfigOption, JsonOption, SetOption, load_settings
from ssmcore.errors import SsmcoreError

if TYPE_CHECKING:
    from ssmcore.registry import Registry
    from ssmcore.settings import Settings
    from ssmcore.strategies import MixerShape, Selection

app = typer.Typer(no_args_is_help=True, help="Show and check settings.")


@app.command()
def show(config: ConfigOption = None, set_: SetOption = None, as_json: JsonOption = False) -> None:
    """Print every value in force and where it came from."""
    from ssmcore.registry import Registry

    registry = Registry.load()
    settings = load_settings(config, set_)
    selection, problem = _selection_here(settings, registry)
    rows, left_out = _rows(settings, registry, selection)
    if as_json:
        answer = {
            "settings": rows,
            "left_out": left_out,
            "notes": list(selection.notes),
            "problem": problem,
        }
        typer.echo(json.dumps(answer, indent=2, default=str))
        return
    from ssmcore.cli.tables import print_table

    print_table(
        ("setting", "value", "source"),
        [(row["key"], json.dumps(row["value"], default=str), row["source"]) for row in rows],
        title="Settings in force",
    )
    for note in selection.notes:
        typer.echo(f"note: {note}")
    if problem:
        typer.echo(f"cannot run here: {problem}")


def _rows(
    settings: Settings, registry: Registry, selection: Selection
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Key, value and source of every setting, and of every option that is left out."""
    from ssmcore.selection import validated_options
    from ssmcore.settings_sources import SECTIONS
    from ssmcore.strategies import SLOTS

    values = settings.effective()
    left_out = []
    chosen_here = {}
    for slot in SLOTS:
        name = selection.names[slot]
        if getattr(settings, slot).name is None and selection.running:
            values[f"{slot}.name"] = name
            chosen_here[f"{slot}.name"] = "chosen here"
        options, _ = validated_options(settings, registry, slot, registry.get(slot, name))
        known = options.model_dump(mode="json", fallback=str)
        for key, value in getattr(settings, slot).options.items():
            if key not in known:
                dotted = f"{slot}.{key}"
                del values[dotted]
                source = settings.source_of(dotted)
                left_out.append({"key": dotted, "value": value, "source": source})
        values |= {f"{slot}.{key}": value for key, value in known.items()}

    def place(key: str) -> tuple[int, bool, str]:
        section, _, name = key.partition(".")
        return SECTIONS.index(section), name != "name", name

    rows = [
        {
            "key": key,
            "value": values[key],
            "source": chosen_here.get(key, settings.source_of(key)),
        }
        for key in sorted(values, key=place)
    ]
    return rows, left_out


def _selection_here(settings: Settings, registry: Registry) -> tuple[Selection, str | None]:
    """The strategies that would run here; those that plan, and the reason, where none can."""
    from ssmcore.selection import select

    try:
        return _running(settings, registry)[0], None
    except SsmcoreError as error:
        return select(settings, registry), str(error)


def _running(settings: Settings, registry: Registry) -> tuple[Selection, str]:
    """What would run on this machine, and on which device."""
    from ssmcore.device import resolve_device
    from ssmcore.selection import select

    device = resolve_device(settings.engine.device)
    mixer, chunk_size = _model_sizes(settings, device)
    selection = select(
        settings, registry, running=True, device=device, mixer=mixer, chunk_size=chunk_size
    )
    return selection, device


def _model_sizes(settings: Settings, device: str) -> tuple[MixerShape | None, int | None]:
    """Mixer and chunk size of a model on this machine; nothing is downloaded for it."""
    from pathlib import Path

    from ssmcore.models.config import Mamba2Config
    from ssmcore.models.hub import BUNDLED, resolve
    from ssmcore.strategies import MixerShape

    path = settings.model.path
    if path != BUNDLED and not Path(path).expanduser().is_dir():
        return None, None
    config = Mamba2Config.from_dir(resolve(path, settings.model.revision))
    dtype = settings.model.dtype
    if dtype == "auto":
        if device != "cpu":  # the weights' own, and they stay unread
            return None, config.chunk_size
        dtype = "float32"
    mixer = MixerShape(
        heads=config.heads,
        headdim=config.headdim,
        dstate=config.dstate,
        groups=config.groups,
        d_conv=config.d_conv,
        activation_dtype=dtype,
        conv_dtype=dtype,
        state_dtype=settings.cache.state_dtype,
    )
    return mixer, config.chunk_size


@app.command()
def check(config: ConfigOption = None, set_: SetOption = None) -> None:
    """Say whether these settings can run on this machine; exit status 1 if not."""
    from ssmcore.registry import Registry

    selection, device = _running(load_settings(config, set_), Registry.load())
    for note in selection.notes:
        typer.echo(f"note: {note}")
    names = ", ".join(f"{slot} {name}" for slot, name in selection.names.items())
    typer.echo(f"ok: {names}, on {device}")


@app.command()
def schema() -> None:
    """Print the JSON schema of the configuration file, with every installed plugin's options."""
    from ssmcore.registry import Registry
    from ssmcore.schema import configuration_schema

    typer.echo(json.dumps(configuration_schema(Registry.load()), indent=2, default=str))
