"""Where settings come from: TOML file, environment, `KEY=VALUE` overrides; merged with provenance.

Every source is a pydantic-settings source that yields sections; `merge` lays later ones over
earlier ones, leaf by leaf, and remembers for each leaf which source it came from.
"""

from __future__ import annotations

import os
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from pydantic.fields import FieldInfo
from pydantic_settings import BaseSettings, PydanticBaseSettingsSource, TomlConfigSettingsSource

from ssmcore.errors import SettingsError, UnknownOptionError
from ssmcore.naming import nearest

ENV_PREFIX = "SSMCORE_"
DEFAULT_FILE = "ssmcore.toml"
SECTIONS = ("model", "engine", "classifier", "cache", "decode", "graph")


class Source(NamedTuple):
    """One source: how messages name it, and its sections.

    `leaves` names single dotted keys otherwise; `texts` has the text that a value was read from.
    """

    name: str
    values: dict[str, Any]
    leaves: Mapping[str, str] = {}
    texts: Mapping[str, str] = {}


class Merged(NamedTuple):
    """Sections laid over each other; by dotted key the rank (from 1) and name of its source.

    `texts` has the text of a value that came from the environment or the command line.
    """

    values: dict[str, Any]
    origins: dict[str, tuple[int, str]]
    texts: dict[str, str]


class _Sections(BaseSettings):
    """What pydantic-settings fills: sections as plain tables, checked later by `Settings`."""

    model: dict[str, Any] = {}
    engine: dict[str, Any] = {}
    classifier: dict[str, Any] = {}
    cache: dict[str, Any] = {}
    decode: dict[str, Any] = {}
    graph: dict[str, Any] = {}


class AssignmentSource(PydanticBaseSettingsSource):
    """Dotted keys with text values, from the environment or the command line."""

    def __init__(self, assignments: Iterable[tuple[str, str, str]]) -> None:
        super().__init__(_Sections)
        self._assignments = list(assignments)

    def get_field_value(self, field: FieldInfo, field_name: str) -> tuple[Any, str, bool]:
        """Not used: sections come whole from `__call__`."""
        return None, field_name, False

    def __call__(self) -> dict[str, Any]:
        """Sections of the assigned keys."""
        sections: dict[str, Any] = {}
        for key, text, origin in self._assignments:
            section, _, name = key.partition(".")
            if section not in SECTIONS:
                raise UnknownOptionError(
                    f"{origin}: there is no section {section!r}{nearest(section, SECTIONS)}"
                )
            if not name or "." in name:
                raise UnknownOptionError(
                    f"{origin}: a key names a section and one setting of it, such as"
                    f" {section}.name ({ENV_PREFIX}{section.upper()}__NAME in the environment)"
                )
            sections.setdefault(section, {})[name] = toml_value(text)
        return sections


def toml_value(text: str) -> Any:
    """A value in TOML syntax; what is none is taken as text."""
    try:
        table = tomllib.loads(f"value = {text}")
    except (ValueError, RecursionError):  # no TOML, or a number or nesting beyond all reason
        return text
    return table["value"] if len(table) == 1 else text


def default_sources(
    config: Path | None, overrides: Sequence[str], environ: Mapping[str, str] | None
) -> list[Source]:
    """File, environment and overrides, lowest precedence first.

    Raises:
        SettingsError: a file that cannot be read, or an assignment that is none.
    """
    sources = []
    path = Path(DEFAULT_FILE) if config is None else config
    if config is not None or path.is_file():
        sources.append(file_source(path))
    variables = {
        name: value
        for name, value in (os.environ if environ is None else environ).items()
        if name.upper().startswith(ENV_PREFIX)
    }
    if variables:
        keys = {name: _variable_key(name) for name in variables}
        values = AssignmentSource(
            (keys[name], value, f"environment {name}") for name, value in variables.items()
        )()
        leaves = {keys[name]: f"environment {name}" for name in variables}
        texts = {keys[name]: value for name, value in variables.items()}
        sources.append(Source("environment", values, leaves, texts))
    if overrides:
        sources.append(override_source(overrides))
    return sources


def _variable_key(name: str) -> str:
    return name[len(ENV_PREFIX) :].lower().replace("__", ".", 1)


def override_source(overrides: Sequence[str]) -> Source:
    """The source of `KEY=VALUE` texts.

    Raises:
        SettingsError: a text that is none, or a key that no section has.
    """
    assignments = []
    for text in overrides:
        key, equals, value = text.partition("=")
        if not equals:
            raise SettingsError(f"--set {text!r:.80}: write KEY=VALUE, e.g. decode.buffer_len=8")
        assignments.append((key.strip(), value.strip(), f"--set {key.strip()}"))
    texts = {key: value for key, value, _ in assignments}
    return Source("--set", AssignmentSource(assignments)(), texts=texts)


def file_source(path: Path) -> Source:
    """The source of a TOML file.

    Raises:
        SettingsError: it is not there or cannot be read.
    """
    try:
        if not path.is_file():  # the source would pass over it
            raise SettingsError(f"{path}: there is no such file")
        values = TomlConfigSettingsSource(_Sections, toml_file=path).toml_data
    except (ValueError, OSError) as error:
        raise SettingsError(f"{path}: {error}") from None
    except RecursionError:
        raise SettingsError(f"{path}: nested too deeply") from None
    return Source(str(path), dict(values))


def merge(sources: Sequence[Source]) -> Merged:
    """Lay sources over each other, the later ones on top.

    Raises:
        SettingsError: a section that is no table.
    """
    values: dict[str, Any] = {}
    origins: dict[str, tuple[int, str]] = {}
    texts: dict[str, str] = {}
    for rank, source in enumerate(sources, start=1):
        for section, table in source.values.items():
            if section not in SECTIONS:
                raise UnknownOptionError(
                    f"{source.name}: there is no section {section!r:.80}"
                    f"{nearest(str(section), SECTIONS)}"
                )
            if not isinstance(table, Mapping):
                raise SettingsError(
                    f"{source.name}: {section} must be a section of settings, got {table!r:.40}"
                )
            merged = values.setdefault(section, {})
            for name, value in table.items():
                key = f"{section}.{name}"
                merged[name] = value
                origins[key] = (rank, source.leaves.get(key, source.name))
                texts.pop(key, None)
                if key in source.texts:
                    texts[key] = source.texts[key]
    return Merged(values, origins, texts)
