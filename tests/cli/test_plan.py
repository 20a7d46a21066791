from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from ssmcore.cli import app

GOLDEN = Path(__file__).parent.parent / "golden" / "plans.jsonl"
REPLAY = {
    "id": "two rows",
    "settings": {
        "cache": {"name": "align", "block_size": 8},
        "decode": {"name": "replay-torch", "buffer_len": 4},
        "model": {"chunk_size": 4},
    },
    "step": {
        "query_start_loc": [0, 1, 7],
        "seq_lens": [16, 6],
        "is_prefilling": [False, True],
        "block_table": [[1, 2], [3, 4]],
        "decode_base": [9, 6],
    },
}


def run(*arguments: str, stdin: str | bytes | None = None):
    return CliRunner().invoke(app, ["plan", *arguments], input=stdin)


def test_golden_plans_come_out_of_the_command_line_as_recorded():
    result = run("--cases", str(GOLDEN))
    assert result.exit_code == 0
    printed = [json.loads(line) for line in result.stdout.splitlines()]
    wanted = [json.loads(line) for line in GOLDEN.read_text().splitlines()]
    assert [case["id"] for case in printed] == [case["id"] for case in wanted]
    for got, want in zip(printed, wanted, strict=True):
        assert holds(got["plan"], want["plan"]), got["id"]


def holds(got: object, want: object) -> bool:
    if isinstance(want, dict):
        return isinstance(got, dict) and all(
            key in got and holds(got[key], value) for key, value in want.items()
        )
    return got == want


def test_a_refused_line_leaves_the_others_alone_and_sets_the_exit_status(tmp_path):
    path = tmp_path / "cases.jsonl"
    path.write_text(f'{json.dumps(REPLAY)}\n{{"id": "bad"}}\n\n{json.dumps(REPLAY)}\n')
    result = run("--cases", str(path))
    assert result.exit_code == 1
    lines = [json.loads(line) for line in result.stdout.splitlines()]
    assert ["plan" in line for line in lines] == [True, False, False, True]
    assert lines[1] == {
        "id": "bad",
        "error": {"code": "key", "message": "the case lacks 'step'", "row": None},
    }


@pytest.mark.parametrize("name", ["absent.jsonl", "."])
def test_a_file_that_cannot_be_read_ends_with_status_2(tmp_path, name):
    result = run("--cases", str(tmp_path / name))
    assert result.exit_code == 2
    assert "cannot read" in result.stderr
    assert result.stdout == ""


def test_an_empty_file_has_no_plans(tmp_path):
    path = tmp_path / "cases.jsonl"
    path.write_text("")
    result = run("--cases", str(path))
    assert (result.exit_code, result.stdout) == (0, "")


def test_cases_come_from_standard_input_too():
    result = run("--cases", "-", stdin=json.dumps(REPLAY))
    assert json.loads(result.stdout)["id"] == "two rows"


def test_a_step_may_stand_on_several_lines(tmp_path):
    path = tmp_path / "step.json"
    path.write_text(json.dumps(REPLAY, indent=2))
    result = run(str(path))
    assert json.loads(result.stdout)["plan"]["decode"]["is_flush"] == [True]


def test_explain_tells_class_slots_cursor_and_why():
    result = run("--explain", stdin=json.dumps(REPLAY))
    assert result.exit_code == 0
    text = result.stdout
    assert "case two rows" in text
    assert "decode replay-torch" in text
    assert "one token, and none of its prompt is missing" in text
    assert "write_pos 2, state lags 2" in text
    assert "yes: completes the block that ends at 16" in text
    assert "the first chunk of its prompt" in text
    assert "2 chunks of up to 4 tokens" in text


def test_explain_tells_leftovers_full_rings_and_padding():
    case = {
        "settings": REPLAY["settings"] | {"graph": {"name": "full-decode"}},
        "step": {
            "query_start_loc": [0, 1, 2, 2, 2],
            "seq_lens": [4, 6, 0, 0],
            "is_prefilling": [True, False, False, False],
            "block_table": [[1, 2], [3, 4], [0, 0], [0, 0]],
            "decode_base": [5, 2, 0, 0],
        },
    }
    text = run("--explain", stdin=json.dumps(case)).stdout
    assert "a prompt tail of one token after 3: runs as a decode" in text
    assert "yes: a prompt tail, before the anchor" in text
    assert "yes: the ring is full" in text
    assert "2..3" in text
    assert "touches no slot" in text
    assert "a graph of 4 rows can run it" in text


def test_explain_of_a_refused_step_says_why():
    result = run("--explain", stdin='{"id": "[red]x[/red]", "step": {}}')
    assert result.exit_code == 1
    assert "case [red]x[/red] is refused (key): step lacks 'query_start_loc'" in result.stdout


def test_overrides_stand_above_a_cases_settings():
    result = run("--cases", "-", "--set", "decode.name=baseline", stdin=json.dumps(REPLAY))
    assert "write_pos" not in json.loads(result.stdout)["plan"]["decode"]


def test_neither_the_working_directory_nor_the_environment_changes_a_plan(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("ssmcore.toml").write_text("[engine]\nmax_model_len = 1\n")
    monkeypatch.setenv("SSMCORE_ENGINE__MAX_NUM_SEQS", "1")
    assert "plan" in json.loads(run("--cases", "-", stdin=json.dumps(REPLAY)).stdout)


def test_a_bad_override_is_one_error_before_any_case():
    result = run("--cases", "-", "--set", "engine.max_seqs=1", stdin="{}")
    assert result.exit_code == 1
    assert "engine.max_seqs" in result.stderr
    assert result.stdout == ""


def test_a_step_and_cases_together_are_refused(tmp_path):
    assert run("x.json", "--cases", "y.jsonl").exit_code == 2


def test_planning_never_loads_torch(tmp_path):
    path = tmp_path / "cases.jsonl"
    path.write_text(json.dumps(REPLAY) + "\n")
    program = (
        "import sys\nfrom ssmcore.cli import app\n"
        f"try: app(['plan', '--cases', {str(path)!r}])\n"
        "except SystemExit as end: assert not end.code\n"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", program], check=True, capture_output=True)


def test_a_reader_that_leaves_is_no_error(tmp_path):
    path = tmp_path / "cases.jsonl"
    path.write_text((json.dumps(REPLAY) + "\n") * 2000)
    program = "from ssmcore.cli import main; main()"
    process = subprocess.Popen(
        [sys.executable, "-c", program, "plan", "--cases", str(path)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.readline()
    process.stdout.close()
    assert process.stderr.read() == b""
    process.stderr.close()
    assert process.wait(timeout=30) == 141
