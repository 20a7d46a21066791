from __future__ import annotations

import json
import os
import pty
import signal
import subprocess
import sys
import time

import pytest
from typer.testing import CliRunner

from ssmcore.cli import app
from ssmcore.cli.answers import shown

SMALL = ["--set", "engine.max_model_len=512"]
PROGRAM = [sys.executable, "-c", "from ssmcore.cli import main; main()", "generate", *SMALL]


def run(*arguments: str, stdin: str | bytes | None = None):
    return CliRunner().invoke(app, ["generate", *SMALL, *arguments], input=stdin)


def lines_of(result) -> list[dict]:
    return [json.loads(line) for line in result.stdout.splitlines()]


def test_one_prompt_gives_its_text_alone_and_the_rest_goes_to_standard_error():
    result = run("import os\n", "--max-tokens", "6")
    assert result.exit_code == 0
    again = lines_of(run("import os\n", "--max-tokens", "6", "--json"))[0]
    assert result.stdout == again["text"] + "\n"
    assert "model quickstart" in result.stderr
    assert "10 prompt tokens" in result.stderr
    assert "6 generated tokens" in result.stderr
    assert "first token after" in result.stderr


def test_quiet_says_nothing_on_standard_error():
    assert run("a", "--max-tokens", "1", "--quiet").stderr == ""


def test_json_tells_all_of_an_output():
    (answer,) = lines_of(run("def f", "--max-tokens", "3", "--logprobs", "2", "--json"))
    assert (answer["index"], answer["id"], answer["prompt"]) == (0, None, "def f")
    assert len(answer["token_ids"]) == 3
    assert answer["finish_reason"] == "length"
    assert answer["usage"] == {"prompt_tokens": 5, "completion_tokens": 3, "cached_tokens": 0}
    assert [len(entry["top"]) for entry in answer["logprobs"]] == [2, 2, 2]
    assert 0 <= answer["timing"]["queueing_s"] <= answer["timing"]["total_s"]


def test_many_prompts_are_answered_in_their_order_under_headings():
    result = run("import os", "class A:", "--max-tokens", "4")
    assert result.stdout.index("==> 1: import os\n") < result.stdout.index("==> 2: class A:\n")
    assert "2 outputs in" in result.stderr


def test_standard_input_is_one_prompt_without_its_last_line_end():
    (answer,) = lines_of(run("--json", "--max-tokens", "1", stdin="def f\n(\n"))
    assert answer["prompt"] == "def f\n("


def test_a_file_is_one_prompt(tmp_path):
    path = tmp_path / "prompt.txt"
    path.write_text("import é")
    (answer,) = lines_of(run("--file", str(path), "--json", "--max-tokens", "1"))
    assert answer["prompt"] == "import é"


def test_json_lines_have_parameters_of_their_own_over_those_of_the_command(tmp_path):
    path = tmp_path / "prompts.jsonl"
    requests = [
        {"id": "a", "prompt": "def f", "max_tokens": 2},
        {"id": 7, "prompt_token_ids": [100, 101, 102]},
        {"prompt": "x", "temperature": 1.0, "seed": 3},
    ]
    path.write_text("".join(json.dumps(request) + "\n" for request in requests))
    result = run("--file", str(path), "--max-tokens", "4")
    answers = lines_of(result)
    assert result.exit_code == 0
    assert [answer["id"] for answer in answers] == ["a", 7, None]
    assert [len(answer["token_ids"]) for answer in answers] == [2, 4, 4]
    assert answers[2]["seed"] == 3
    assert "3 outputs" in result.stderr


def test_a_bad_line_gives_an_error_object_and_the_others_are_served():
    bad = [
        (b"", "line 1: empty"),
        (b"{", "line 2: not JSON"),
        (b'{"id": "n"}', "line 3: give either 'prompt' or 'prompt_token_ids'"),
        (b'{"id": "n", "prompt": "a", "prompt_token_ids": [1]}', "line 4: give either"),
        (b'{"id": "n", "promt": "a"}', "line 5: unknown key 'promt'"),
        (b'{"id": "n", "prompt": 5}', "line 6: prompt must be text"),
        (b'{"id": "n", "prompt": ""}', "the prompt is empty"),
        (b'{"id": "n", "prompt_token_ids": [1.0]}', "line 8: prompt_token_ids must be"),
        (b'{"id": "n", "prompt_token_ids": [257]}', "257"),
        (b'{"id": "n", "prompt": "a", "max_tokens": 0}', "line 10: max_tokens = 0"),
        (b'{"id": "n", "prompt": "a", "temperature": NaN}', "line 11: NaN is no JSON"),
        (b'{"id": "n", "prompt": "a", "stop": [1]}', "line 12: stop must hold"),
        (b'{"id": "n", "prompt": "%s"}' % (b"a" * 512), "at most 511"),
        (b'{"id": "n", "prompt": "\\ud800"}', ""),
        (b"[" * 100_000, "line 15: nested too deeply"),
        (b"\xff", "line 16: not UTF-8"),
    ]
    good = b'{"id": "good", "prompt": "a", "max_tokens": 1}'
    result = run("--jsonl", stdin=b"\n".join([*(line for line, _ in bad), good]))
    answers = lines_of(result)
    assert result.exit_code == 1
    assert [answer["index"] for answer in answers] == list(range(17))
    for answer, (line, message) in zip(answers, bad, strict=False):
        assert answer["error"]["code"] == "request"
        assert message in answer["error"]["message"], line[:80]
        assert answer["id"] == ("n" if b'"id"' in line and b"NaN" not in line else None)
    assert answers[-1]["id"] == "good"
    assert len(answers[-1]["token_ids"]) == 1


def test_more_prompts_than_are_held_at_once_all_come_out_in_order():
    count = 300
    lines = "".join(json.dumps({"id": at, "prompt": "ab"}) + "\n" for at in range(count))
    result = run("--jsonl", "--max-tokens", "1", "--quiet", stdin=lines)
    assert [answer["id"] for answer in lines_of(result)] == list(range(count))


def test_a_refused_prompt_is_an_error_and_the_status_says_so():
    result = run("", "b", "--max-tokens", "1")
    assert result.exit_code == 1
    assert "prompt 1: the prompt is empty" in result.stderr
    assert "==> 2: b" in result.stdout


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        (["a", "--file", "b"], 2, "not both"),
        (["a", "--jsonl"], 2, "--jsonl"),
        (["--file", "/nowhere/at/all"], 2, "cannot read"),
        (["--file", "/nowhere/at/all.jsonl"], 2, "cannot read"),
        (["a", "--temperature", "-1"], 1, "temperature = -1.0"),
        (["a", "--max-tokens", "0"], 1, "max_tokens = 0"),
        (["a", "--top-p", "nan"], 1, "top_p"),
        (["a", "--set", "engine.max_seqs=1"], 1, "engine.max_seqs"),
        (["a", "--set", "model.path=nowhere/at-all-here"], 1, "nowhere/at-all-here"),
    ],
)
def test_a_command_that_cannot_be_is_one_message(arguments, status, message):
    result = run(*arguments)
    assert result.exit_code == status
    assert message in result.stderr
    assert result.stdout == ""


def test_a_stop_text_ends_the_output():
    whole = lines_of(run("import os\n", "--json", "--max-tokens", "12"))[0]["text"]
    stop = whole[4:6]
    (answer,) = lines_of(run("import os\n", "--json", "--max-tokens", "12", "--stop", stop))
    assert answer["finish_reason"] == "stop"
    assert answer["text"] == whole[: whole.index(stop)]


def test_a_terminal_gets_no_control_characters():
    assert shown("a\x1b[2Jb\tc\n\x07\x9b", True) == "a\ufffd[2Jb\tc\n\ufffd\ufffd"
    assert shown("a\x1b", False) == "a\x1b"


def test_a_terminal_sees_the_prompt_and_the_text_as_it_comes():
    main, terminal = pty.openpty()
    process = subprocess.Popen(
        [*PROGRAM, "import os", "--max-tokens", "8", "--quiet"],
        stdin=terminal,
        stdout=terminal,
        stderr=subprocess.PIPE,
    )
    os.close(terminal)
    pieces = []
    while True:
        try:
            piece = os.read(main, 4096)
        except OSError:
            break
        if not piece:
            break
        pieces.append(piece)
    os.close(main)
    assert process.wait(timeout=60) == 0
    assert process.stderr is not None
    assert process.stderr.read() == b""
    process.stderr.close()
    assert b"import os" in b"".join(pieces)
    assert len(pieces) > 4


def test_control_c_ends_with_what_was_generated_so_far():
    process = subprocess.Popen(
        [*PROGRAM, "def f", "--max-tokens", "500", "--ignore-eos"],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert process.stdout is not None
    assert process.stderr is not None
    first = os.read(process.stdout.fileno(), 1)
    process.send_signal(signal.SIGINT)
    rest, errors = process.communicate(timeout=60)
    assert process.returncode == 130
    assert len(first + rest) < 400
    assert rest.endswith(b"\n")
    assert b"interrupted" in errors
    assert b"generated tokens" in errors
    assert b"Traceback" not in errors


def test_control_c_while_waiting_for_input_ends_at_once():
    process = subprocess.Popen(
        [*PROGRAM, "--jsonl", "--max-tokens", "2"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(b'{"prompt": "a"}\n')
    process.stdin.flush()
    answer = json.loads(process.stdout.readline())  # comes although the input goes on
    assert len(answer["token_ids"]) == 2
    process.send_signal(signal.SIGINT)
    begun = time.monotonic()
    process.wait(timeout=30)
    assert time.monotonic() - begun < 10
    _, errors = process.communicate()
    assert process.returncode == 130
    assert b"Traceback" not in errors
    assert b"Fatal" not in errors


def test_a_reader_that_leaves_is_no_error():
    process = subprocess.Popen(
        [*PROGRAM, "def f", "--max-tokens", "400", "--ignore-eos", "--quiet"],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert process.stdout is not None
    assert process.stderr is not None
    os.read(process.stdout.fileno(), 1)
    process.stdout.close()
    assert process.stderr.read() == b""
    process.stderr.close()
    assert process.wait(timeout=60) == 141
