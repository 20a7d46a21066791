"""The type of an option, from its JSON schema, as a person says it: `integer, 1 to 64`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any


def type_in_words(option: Mapping[str, Any], definitions: Mapping[str, Any]) -> str:
    """Type, choices and bounds of one property; `definitions` are the schema's `$defs`."""
    if "$ref" in option:
        option = definitions.get(str(option["$ref"]).rpartition("/")[2], {})
    alternatives = option.get("anyOf") or option.get("oneOf")
    if alternatives:
        return " or ".join(type_in_words(part, definitions) for part in alternatives)
    if "const" in option:
        return json.dumps(option["const"])
    if "enum" in option:
        return " | ".join(json.dumps(value) for value in option["enum"])
    text = str(option.get("type", "any"))
    if text == "array" and isinstance(option.get("items"), Mapping):
        text = f"array of {type_in_words(option['items'], definitions)}"
    bounds = [
        f"{words} {option[key]}"
        for key, words in (
            ("minimum", "at least"),
            ("maximum", "at most"),
            ("exclusiveMinimum", "more than"),
            ("exclusiveMaximum", "less than"),
            ("multipleOf", "a multiple of"),
            ("minLength", "of length at least"),
            ("maxLength", "of length at most"),
        )
        if key in option
    ]
    if "minimum" in option and "maximum" in option:
        bounds = [f"{option['minimum']} to {option['maximum']}", *bounds[2:]]
    return ", ".join([text, *bounds])
