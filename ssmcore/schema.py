"""The JSON schema of a configuration file, with the options of every installed strategy."""

from __future__ import annotations

from typing import Any

from ssmcore.registry import Registry
from ssmcore.settings import DEFAULT_NAMES, Settings
from ssmcore.strategies import SLOTS


def configuration_schema(registry: Registry) -> dict[str, Any]:
    """Schema of all sections; a slot's section has one alternative per strategy."""
    schema: dict[str, Any] = {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "ssmcore configuration",
        "type": "object",
        "additionalProperties": False,
        "properties": {},
        "$defs": {},
    }
    for section, field in Settings.model_fields.items():
        model: Any = field.annotation
        part = model.model_json_schema()
        schema["$defs"].update(part.pop("$defs", {}))
        if section not in SLOTS:
            schema["properties"][section] = part
            continue
        core = part["properties"]
        core.pop("name")
        schema["properties"][section] = {
            "title": part["title"],
            "description": part.get("description", ""),
            "anyOf": [
                _alternative(entry.record, core, DEFAULT_NAMES[section], schema["$defs"])
                for entry in registry.records(section)
            ],
        }
    return schema


def _alternative(
    record: Any, core: dict[str, Any], default: str | None, definitions: dict[str, Any]
) -> dict[str, Any]:
    options = record.options.model_json_schema()
    definitions.update(options.pop("$defs", {}))
    name: dict[str, Any] = {"const": record.name, "description": record.summary}
    alternative: dict[str, Any] = {
        "title": record.name,
        "type": "object",
        "additionalProperties": False,
        "properties": {"name": name, **core, **options.get("properties", {})},
    }
    if record.name == default:
        name["default"] = record.name
    else:
        alternative["required"] = ["name"]
    return alternative
