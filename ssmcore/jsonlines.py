"""Strict JSON, one value a line: steps to plan, prompts to serve, traces to replay.

Lines come from people and from other programs, so nothing about them is believed: length,
encoding, depth, keys, numbers. A bad line is an error of its own that says what is wrong; the lines
after it are read all the same. What a line means is its reader's business.
"""

from __future__ import annotations

import codecs
import json
from collections import Counter
from collections.abc import Iterator
from typing import Any, BinaryIO, NamedTuple

MAX_LINE_BYTES = 2**24


class JsonLineError(ValueError):
    """A line that is not one JSON value; `value` holds what could be read of it, or None."""

    def __init__(self, message: str, value: Any = None) -> None:
        super().__init__(message)
        self.value = value


class Line(NamedTuple):
    """A line of a file: its number from 1, and its bytes; None where it was too long to keep."""

    number: int
    data: bytes | None


def read_lines(stream: BinaryIO, max_bytes: int = MAX_LINE_BYTES) -> Iterator[Line]:
    """Lines of a stream without their ends; never holds more than `max_bytes` of one.

    A byte order mark at the start is dropped.
    """
    number = 0
    while data := stream.readline(max_bytes + 1):
        number += 1
        if len(data) > max_bytes and not data.endswith(b"\n"):
            while data and not data.endswith(b"\n"):
                data = stream.readline(2**20)
            yield Line(number, None)
            continue
        if number == 1:
            data = data.removeprefix(codecs.BOM_UTF8)
        yield Line(number, data.rstrip(b"\r\n"))


def parse_line(line: Line, max_bytes: int = MAX_LINE_BYTES) -> Any:
    """The JSON value of a line.

    Raises:
        JsonLineError: empty, too long, not UTF-8, not JSON, nested too deeply, a key given twice,
            or a number that is no finite number.
    """
    if line.data is None:
        raise JsonLineError(f"the line is longer than {max_bytes} bytes")
    return parse_json(line.data)


def parse_json(data: bytes) -> Any:
    """The JSON value of some text; raises as `parse_line` does."""
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise JsonLineError(f"not UTF-8: byte {error.start} is {data[error.start]:#04x}") from None
    if not text.strip():
        raise JsonLineError("empty; it must hold one JSON object")
    repeated: list[str] = []

    def pairs(items: list[tuple[str, Any]]) -> dict[str, Any]:
        value = dict(items)
        if len(value) < len(items) and not repeated:
            counts = Counter(key for key, _ in items)
            repeated.append(next(key for key, count in counts.items() if count > 1))
        return value

    try:
        value = json.loads(
            text, object_pairs_hook=pairs, parse_float=_finite, parse_constant=_no_constant
        )
    except json.JSONDecodeError as error:
        raise JsonLineError(f"not JSON: {error.msg} at character {error.pos}") from None
    except RecursionError:
        raise JsonLineError("nested too deeply") from None
    except JsonLineError:
        raise
    except ValueError:  # Python reads no integer of more than some thousand digits
        raise JsonLineError("an integer has too many digits") from None
    if repeated:
        raise JsonLineError(f"the key {repeated[0]!r:.80} is given twice", value)
    return value


def dump_line(value: Any) -> str:
    """One line of strict JSON, ASCII, without the line's end."""
    return json.dumps(value, allow_nan=False)


def _finite(text: str) -> float:
    number = float(text)
    if number - number != 0:
        raise JsonLineError(f"the number {text:.40} is beyond a double's range")
    return number


def _no_constant(text: str) -> float:
    raise JsonLineError(f"{text} is no JSON number")
