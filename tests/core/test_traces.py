from __future__ import annotations

import json
from pathlib import Path

import pytest

from ssmcore.errors import TraceError
from ssmcore.traces import read_trace, without_empty

DATA = Path(__file__).parent.parent / "data"
HEADER = "TIMESTAMP,ContextTokens,GeneratedTokens\n"


def written(tmp_path: Path, content: str | bytes) -> Path:
    path = tmp_path / "trace"
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


def test_azure_arrivals_count_from_the_first_request():
    trace = read_trace(DATA / "chat_small.csv")
    assert trace.format == "azure"
    assert trace.name == "chat_small.csv"
    first, second = trace.requests[:2]
    assert (first.arrival, first.prompt_tokens, first.output_tokens) == (0, 37, 9)
    assert second.arrival == pytest.approx(0.25)
    assert first.hash_ids is None


def test_mooncake_milliseconds_become_seconds_and_hash_ids_are_kept():
    trace = read_trace(DATA / "shared_small.jsonl")
    assert trace.format == "mooncake"
    assert trace.requests[2].arrival == pytest.approx(0.4)
    assert trace.requests[2].hash_ids == (1, 2, 4)


@pytest.mark.parametrize("name", ["chat_small.csv", "shared_small.jsonl"])
def test_limit_reads_the_first_requests_only(name):
    assert len(read_trace(DATA / name, limit=2).requests) == 2


def test_lines_after_the_limit_are_not_looked_at(tmp_path):
    path = written(tmp_path, HEADER + "2023-11-16 18:15:46,5,5\nnonsense\n")
    assert len(read_trace(path, limit=1).requests) == 1


def test_crlf_quotes_blank_lines_byte_order_mark_and_further_columns_are_read(tmp_path):
    text = "\ufeffid," + HEADER + '\r\n"a,b",2024-05-10 00:00:00.009930+00:00,7,3\r\n'
    (request,) = read_trace(written(tmp_path, text)).requests
    assert (request.prompt_tokens, request.output_tokens) == (7, 3)


def test_requests_out_of_order_are_sorted_and_counted(tmp_path):
    times = ("18:15:46", "18:15:44", "18:15:45")
    rows = "".join(f"2023-11-16 {time},{at + 1},1\n" for at, time in enumerate(times))
    trace = read_trace(written(tmp_path, HEADER + rows))
    assert [request.prompt_tokens for request in trace.requests] == [2, 3, 1]
    assert [request.arrival for request in trace.requests] == [0, 1, 2]
    assert trace.reordered == 2


def test_requests_without_tokens_can_be_left_out(tmp_path):
    rows = "2023-11-16 18:15:46,0,5\n2023-11-16 18:15:46,5,0\n2023-11-16 18:15:46,5,5\n"
    kept, left_out = without_empty(read_trace(written(tmp_path, HEADER + rows)))
    assert len(kept.requests) == 1
    assert left_out == 2


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "is empty"),
        (HEADER, "no requests"),
        ("a,b,c\n1,2,3\n", "line 1: neither a CSV header with TIMESTAMP"),
        (b"\x00\xff\xfe", "line 1: not UTF-8"),
        (HEADER + "2023-11-16 18:15:46,5\n", "line 2: 2 columns, the header has 3"),
        (HEADER + "yesterday,5,5\n", "line 2: TIMESTAMP 'yesterday'"),
        (HEADER + "2023-11-16 18:15:46,-5,5\n", "line 2: ContextTokens '-5'"),
        (HEADER + "2023-11-16 18:15:46,5,5.5\n", "line 2: GeneratedTokens '5.5'"),
        (HEADER + "2023-11-16 18:15:46,99999999999,5\n", "line 2: ContextTokens"),
        (HEADER + "2023-11-16 18:15:46,٣,5\n", "line 2: ContextTokens"),
        (HEADER + '2023-11-16 18:15:46,"5,5\n', "line 2: unexpected end of data"),
        ('{"timestamp": 0', "line 1: not JSON"),
        ('{"timestamp": 0, "input_length": 1, "output_length": 1}', "line 1: hash_ids is missing"),
        ("{}\n", "line 1: timestamp is missing"),
    ],
)
def test_a_bad_trace_is_refused_with_its_line(tmp_path, content, message):
    path = written(tmp_path, content)
    with pytest.raises(TraceError, match=message) as caught:
        read_trace(path)
    assert path.name in str(caught.value)


GOOD = {"timestamp": 0, "input_length": 600, "output_length": 2, "hash_ids": [0, 1]}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"timestamp": "0"}, "timestamp '0' is no number"),
        ({"timestamp": -1}, "timestamp -1 is out of range"),
        ({"timestamp": 1e300}, "out of range"),
        ({"input_length": 600.0}, "input_length 600.0"),
        ({"output_length": True}, "output_length True"),
        ({"input_length": 2**40}, "input_length"),
        ({"hash_ids": [0]}, "1 hash_ids for a prompt of 600 tokens"),
        ({"hash_ids": [0, -1]}, "hash_ids must be"),
        ({"hash_ids": 5}, "hash_ids must be"),
    ],
)
def test_a_bad_mooncake_line_is_refused_with_its_number(tmp_path, change, message):
    path = written(tmp_path, json.dumps(GOOD) + "\n" + json.dumps(GOOD | change) + "\n")
    with pytest.raises(TraceError, match=message) as caught:
        read_trace(path)
    assert "trace, line 2:" in str(caught.value)


def test_a_missing_file_is_a_trace_error(tmp_path):
    with pytest.raises(TraceError, match="No such file"):
        read_trace(tmp_path / "absent.csv")
    with pytest.raises(TraceError, match="directory"):
        read_trace(tmp_path)
