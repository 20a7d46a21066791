"""Prompts from JSON lines: each an object with its text or token ids and its own parameters."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, NamedTuple

from ssmcore.engine.requests import SamplingParams
from ssmcore.errors import RequestError
from ssmcore.jsonlines import JsonLineError, Line, dump_line, parse_line

PARAMETERS = frozenset(field.name for field in dataclasses.fields(SamplingParams))
_KNOWN = ("id", "prompt", "prompt_token_ids", *sorted(PARAMETERS))


class PromptRequest(NamedTuple):
    """What one line asks for; `error` in place of a prompt where it cannot be served."""

    id: Any
    prompt: str | list[int]
    params: SamplingParams | None
    error: RequestError | None = None


def prompt_of(line: Line, defaults: Mapping[str, Any]) -> PromptRequest:
    """Read one line; `defaults` are parameters that it does not give itself.

    Whatever is wrong with the line comes back as `error`, so that the other lines are served.
    """
    name: Any = None
    try:
        value = parse_line(line)
        if not isinstance(value, dict):
            raise RequestError(f"must be a JSON object, got {type(value).__name__}")
        name = _id(value)
        return PromptRequest(name, _prompt(value), _params(value, defaults))
    except JsonLineError as error:
        if isinstance(error.value, dict):
            name = _id(error.value)
        return _refused(name, line, error)
    except RequestError as error:
        return _refused(name, line, error)


def _refused(name: Any, line: Line, error: Exception) -> PromptRequest:
    return PromptRequest(name, "", None, RequestError(f"line {line.number}: {error}"))


def _id(value: Mapping[str, Any]) -> Any:
    try:
        dump_line(value.get("id"))
    except RecursionError:
        return None
    return value.get("id")


def _prompt(value: Mapping[str, Any]) -> str | list[int]:
    for key in value:
        if key not in _KNOWN:
            raise RequestError(f"unknown key {key!r:.80}; known: {', '.join(_KNOWN)}")
    text, tokens = value.get("prompt"), value.get("prompt_token_ids")
    if (text is None) == (tokens is None):
        raise RequestError("give either 'prompt' or 'prompt_token_ids'")
    if text is not None:
        if not isinstance(text, str):
            raise RequestError(f"prompt must be text, got {type(text).__name__}")
        return text
    if not isinstance(tokens, list) or not all(type(token) is int for token in tokens):
        raise RequestError("prompt_token_ids must be a list of integers")
    return tokens


def _params(value: Mapping[str, Any], defaults: Mapping[str, Any]) -> SamplingParams:
    given = {key: value[key] for key in value if key in PARAMETERS}
    return SamplingParams(**{**defaults, **given})
