"""The JSON schema of a configuration file, with the options of every installed strategy."""

from __future__ import annotations

from typing import Any

from ssmcore.registry import Registry
from ssmcore.settings import DEFAULT_NAMES, Settings
from ssmcore.strategies import SLOTS, Slot, StrategyRecord


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
    definitions: dict[str, Any] = schema["$defs"]
    for section, field in Settings.model_fields.items():
        model: Any = field.annotation
        part = model.model_json_schema()
        definitions.update(part.pop("$defs", {}))
        if section not in SLOTS:
            schema["properties"][section] = part
            continue
        core = part["properties"]
        core.pop("name")
        schema["properties"][section] = {
            "title": part["title"],
            "description": part.get("description", ""),
            "anyOf": [
                _alternative(section, entry.record, core, definitions)
                for entry in registry.records(section)
            ],
        }
    if not definitions:
        del schema["$defs"]
    return schema


def _alternative(
    slot: Slot, record: StrategyRecord[Any], core: dict[str, Any], definitions: dict[str, Any]
) -> dict[str, Any]:
    """A section with one strategy; the name may be left out where the strategy is taken anyway."""
    prefix = f"{slot}.{record.name}."
    options = record.options.model_json_schema(ref_template=f"#/$defs/{prefix}{{model}}")
    for name, definition in options.pop("$defs", {}).items():
        definitions[prefix + name] = definition
    default = DEFAULT_NAMES[slot]
    name_schema: dict[str, Any] = {"const": record.name, "description": record.summary}
    required = list(options.get("required", ()))
    if default == record.name:
        name_schema["default"] = record.name
    elif default is not None:
        required.insert(0, "name")
    alternative: dict[str, Any] = {
        "title": record.name,
        "type": "object",
        "additionalProperties": False,
        "properties": {"name": name_schema, **core, **options.get("properties", {})},
    }
    if required:
        alternative["required"] = required
    return alternative
