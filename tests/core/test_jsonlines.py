from __future__ import annotations

import io

import pytest

from ssmcore.jsonlines import JsonLineError, Line, dump_line, parse_json, parse_line, read_lines


def lines_of(data: bytes, max_bytes: int = 16) -> list[Line]:
    return list(read_lines(io.BytesIO(data), max_bytes))


def test_lines_keep_their_numbers_and_lose_their_ends():
    assert lines_of(b"\xef\xbb\xbfa\r\n\nb") == [(1, b"a"), (2, b""), (3, b"b")]


def test_a_line_of_exactly_the_limit_is_kept():
    assert lines_of(b"x" * 16 + b"\ny") == [(1, b"x" * 16), (2, b"y")]


@pytest.mark.parametrize("length", [17, 18, 40, 2**20 + 40])
def test_a_line_too_long_is_skipped_and_the_next_is_read(length):
    assert lines_of(b"x" * length + b"\nnext\n") == [(1, None), (2, b"next")]
    with pytest.raises(JsonLineError, match="longer than 16 bytes"):
        parse_line(Line(1, None), 16)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "empty"),
        (b" \t ", "empty"),
        (b'{"a": 1', "not JSON"),
        (b"{} {}", "not JSON: Extra data at character 3"),
        (b'{"a": "\xff"}', "not UTF-8: byte 7 is 0xff"),
        (b"\xff\xfe{\x00", "not UTF-8: byte 0"),
        (b"NaN", "NaN is no JSON number"),
        (b"[-Infinity]", "-Infinity is no JSON number"),
        (b"[1e999]", "beyond a double's range"),
        (b"1" * 5000, "too many digits"),
        (b"[" * 100_000, "nested too deeply"),
        (b'{"a":' * 100_000, "nested too deeply"),
    ],
)
def test_what_is_no_json_is_refused(data, message):
    with pytest.raises(JsonLineError, match=message):
        parse_json(data)


def test_a_key_given_twice_is_refused_and_the_rest_can_be_read():
    with pytest.raises(JsonLineError, match="'b' is given twice") as caught:
        parse_json(b'{"id": "x", "a": {"b": 1, "c": 2, "b": 3}}')
    assert caught.value.value["id"] == "x"


def test_what_is_written_is_strict():
    assert dump_line({"a": "\ud800é", "b": None}) == '{"a": "\\ud800\\u00e9", "b": null}'
    with pytest.raises(ValueError, match="JSON"):
        dump_line(float("nan"))
