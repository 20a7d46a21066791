"""Serving traces: when requests came, how long they were, and which prefixes they shared.

Two published formats are read and told apart by their first line. Azure's is CSV with a header
`TIMESTAMP,ContextTokens,GeneratedTokens` (Patel et al., "Splitwise", ISCA 2024). Mooncake's is
JSON lines with `timestamp` (ms), `input_length`, `output_length` and `hash_ids`, one id per 512
tokens of the prompt (Qin et al., "Mooncake", FAST 2025). Neither has text; making prompts of the
right lengths is the part of `ssmcore.bench.workload`.
"""

from __future__ import annotations

import csv
import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, BinaryIO, Literal, NamedTuple

from ssmcore.errors import TraceError
from ssmcore.jsonlines import JsonLineError, Line, parse_json, read_lines

TraceFormat = Literal["azure", "mooncake"]

BLOCK_TOKENS = 512
"""Prompt tokens that one hash id of a Mooncake trace stands for."""

MAX_LINE_BYTES = 2**22

_AZURE_COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
_MOONCAKE_KEYS = ("timestamp", "input_length", "output_length", "hash_ids")
_MOST_TOKENS = 2**31 - 1


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """One request of a trace.

    Attributes:
        index: its place in the trace, from 0.
        arrival: seconds after the trace's first request.
        prompt_tokens, output_tokens: lengths; 0 is possible, real traces have it.
        hash_ids: one id per `BLOCK_TOKENS` of the prompt; equal ids in equal places are equal
            prefixes. None where the trace knows nothing of sharing.
    """

    index: int
    arrival: float
    prompt_tokens: int
    output_tokens: int
    hash_ids: tuple[int, ...] | None = None


@dataclass(frozen=True, slots=True)
class Trace:
    """Requests in order of arrival.

    Attributes:
        name: the file's name, without its folder.
        reordered: how many requests stood behind one that came later.
    """

    name: str
    format: TraceFormat
    requests: tuple[TraceRequest, ...]
    reordered: int = 0


class _Entry(NamedTuple):
    """One line as it stands: seconds by the trace's own clock, lengths, hash ids."""

    seconds: float
    prompt_tokens: int
    output_tokens: int
    hash_ids: tuple[int, ...] | None


def read_trace(path: Path, limit: int | None = None) -> Trace:
    """Read a trace, or its first `limit` requests (later lines are not looked at).

    Raises:
        TraceError: no such file, a format that is neither, or a bad line, named by its number.
    """
    try:
        with path.open("rb") as stream:
            return _read(stream, path.name, limit)
    except OSError as error:
        raise TraceError(f"{path}: {error.strerror or error}") from error


def _read(stream: BinaryIO, name: str, limit: int | None) -> Trace:
    lines = read_lines(stream, MAX_LINE_BYTES)
    first = next(lines, None)
    if first is None:
        raise TraceError(f"{name} is empty; a trace has a line per request")
    kind: TraceFormat
    if first.data is not None and first.data.lstrip().startswith(b"{"):
        kind, entries = "mooncake", _mooncake(itertools.chain([first], lines), name)
    else:
        kind, entries = "azure", _azure(first, lines, name)
    return _ordered(name, kind, list(itertools.islice(entries, limit)))


def _ordered(name: str, kind: TraceFormat, entries: list[_Entry]) -> Trace:
    if not entries:
        raise TraceError(f"{name} has no requests")
    latest = entries[0].seconds
    reordered = 0
    for entry in entries:
        reordered += entry.seconds < latest
        latest = max(latest, entry.seconds)
    entries.sort(key=lambda entry: entry.seconds)
    start = entries[0].seconds
    requests = tuple(
        TraceRequest(
            index, entry.seconds - start, entry.prompt_tokens, entry.output_tokens, entry.hash_ids
        )
        for index, entry in enumerate(entries)
    )
    return Trace(name, kind, requests, reordered)


def _text(line: Line, name: str) -> str:
    if line.data is None:
        raise TraceError(f"{name}, line {line.number}: longer than {MAX_LINE_BYTES} bytes")
    try:
        return line.data.decode("utf-8")
    except UnicodeDecodeError:
        raise TraceError(f"{name}, line {line.number}: not UTF-8 text") from None


def _azure(header: Line, lines: Iterable[Line], name: str) -> Iterator[_Entry]:
    names = [column.strip() for column in _columns(header, name)]
    missing = [column for column in _AZURE_COLUMNS if column not in names]
    if missing:
        raise TraceError(
            f"{name}, line 1: neither a CSV header with {', '.join(_AZURE_COLUMNS)} nor a JSON"
            f" object with {', '.join(_MOONCAKE_KEYS)}; it begins {_text(header, name)!r:.60}"
        )
    at, prompt, output = (names.index(column) for column in _AZURE_COLUMNS)
    for line in lines:
        if line.data is not None and not line.data.strip():
            continue
        values = _columns(line, name)
        where = f"{name}, line {line.number}"
        if len(values) != len(names):
            raise TraceError(f"{where}: {len(values)} columns, the header has {len(names)}")
        yield _Entry(
            _clock(values[at], where),
            _digits(values[prompt], "ContextTokens", where),
            _digits(values[output], "GeneratedTokens", where),
            None,
        )


def _columns(line: Line, name: str) -> list[str]:
    try:
        return next(csv.reader([_text(line, name)], strict=True), [])
    except csv.Error as error:
        raise TraceError(f"{name}, line {line.number}: {error}") from None


def _clock(text: str, where: str) -> float:
    try:
        time = datetime.fromisoformat(text.strip())
        if time.tzinfo is None:
            time = time.replace(tzinfo=UTC)
        return time.timestamp()
    except (ValueError, OverflowError):
        raise TraceError(
            f"{where}: TIMESTAMP {text!r:.40} is no time like 2023-11-16 18:15:46.68"
        ) from None


def _digits(text: str, what: str, where: str) -> int:
    text = text.strip()
    if not (text.isascii() and text.isdigit() and len(text) <= 10) or int(text) > _MOST_TOKENS:
        raise TraceError(f"{where}: {what} {text!r:.40} is no number of tokens")
    return int(text)


def _mooncake(lines: Iterable[Line], name: str) -> Iterator[_Entry]:
    for line in lines:
        if line.data is not None and not line.data.strip():
            continue
        where = f"{name}, line {line.number}"
        try:
            value = parse_json(_text(line, name).encode())
        except JsonLineError as error:
            raise TraceError(f"{where}: {error}") from None
        if not isinstance(value, dict):
            raise TraceError(f"{where}: not a JSON object")
        for key in _MOONCAKE_KEYS:
            if key not in value:
                raise TraceError(f"{where}: {key} is missing")
        yield _mooncake_entry(value, where)


def _mooncake_entry(value: dict[str, Any], where: str) -> _Entry:
    timestamp = value["timestamp"]
    if isinstance(timestamp, bool) or not isinstance(timestamp, int | float):
        raise TraceError(f"{where}: timestamp {timestamp!r:.40} is no number of milliseconds")
    if not 0 <= timestamp < 2**53:
        raise TraceError(f"{where}: timestamp {timestamp!r:.40} is out of range")
    lengths = []
    for key in ("input_length", "output_length"):
        length = value[key]
        if type(length) is not int or not 0 <= length <= _MOST_TOKENS:
            raise TraceError(f"{where}: {key} {length!r:.40} is no number of tokens")
        lengths.append(length)
    hash_ids = value["hash_ids"]
    if not isinstance(hash_ids, list) or not all(
        type(block) is int and 0 <= block < 2**64 for block in hash_ids
    ):
        raise TraceError(f"{where}: hash_ids must be a list of integers from 0")
    blocks = -(-lengths[0] // BLOCK_TOKENS)
    if len(hash_ids) != blocks:
        raise TraceError(
            f"{where}: {len(hash_ids)} hash_ids for a prompt of {lengths[0]} tokens; one for each"
            f" {BLOCK_TOKENS} makes {blocks}"
        )
    return _Entry(timestamp / 1000, lengths[0], lengths[1], tuple(hash_ids))


def without_empty(trace: Trace) -> tuple[Trace, int]:
    """The trace without requests of no prompt or no output tokens, and how many those were."""
    kept = tuple(
        request for request in trace.requests if request.prompt_tokens and request.output_tokens
    )
    return replace(trace, requests=kept), len(trace.requests) - len(kept)
