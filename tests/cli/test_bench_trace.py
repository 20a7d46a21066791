from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from ssmcore.bench.machine import command_line
from ssmcore.cli import app

DATA = Path(__file__).parent.parent / "data"
CHAT = str(DATA / "chat_small.csv")
SHARED = str(DATA / "shared_small.jsonl")
SMALL = ["--set", "engine.max_model_len=2048"]


def run(*arguments: str):
    return CliRunner().invoke(app, ["bench", "trace", *SMALL, *arguments])


def test_an_azure_trace_is_replayed_and_reported():
    result = run(CHAT, "--speed", "max")
    assert result.exit_code == 0
    assert "chat_small.csv (azure): 8 requests" in result.stderr
    for text in (
        "8 of 8 requests finished",
        "622 and 59 tokens",
        "capped: no request (engine.max_model_len = 2048)",
        "time to first token",
        "time per output token",
        "queueing",
        "batch size",
        "slots in use",
        "p99",
    ):
        assert text in result.stdout


def test_lengths_are_the_traces_and_times_fit_together():
    report = json.loads(run(CHAT, "--speed", "10", "--json").stdout)
    assert report["complete"] is True
    assert report["tokens"] == {"prompt": 622, "generated": 59}
    assert report["seconds"] >= report["trace"]["span_s"] / 10
    first, queueing = report["time_to_first_token_s"], report["queueing_s"]
    assert 0 <= queueing["p50"] <= first["p50"] <= report["latency_s"]["max"]
    assert report["throughput"]["requests_per_s"] == pytest.approx(8 / report["seconds"])
    assert report["steps"]["tokens"]["max"] >= 300
    assert report["engine"]["strategies"]["cache"] == "none"
    assert report["machine"]["torch"]


def test_shared_prefixes_of_a_mooncake_trace_are_found_by_the_cache():
    arguments = ["--speed", "max", "--json", "--set", "cache.name=align"]
    arguments += ["--set", "cache.block_size=64", "--set", "engine.max_num_seqs=1"]
    arguments += ["--set", "engine.max_num_batched_tokens=64"]  # a state is kept at every block end
    report = json.loads(run(SHARED, *arguments).stdout)
    cache = report["cache"]
    assert cache["requests_with_hits"] == 4  # all that begin with block 1 but the first
    assert cache["tokens_saved"] == 512 + 640 + 1024 + 448
    assert cache["hit_rate"] == pytest.approx(cache["tokens_saved"] / report["tokens"]["prompt"])
    assert report["slots"]["cached"]["max"] > 0


def test_caps_are_said_and_counted():
    result = run(CHAT, "--speed", "max", "--max-prompt", "50", "--max-output", "5", "--json")
    report = json.loads(result.stdout)
    assert report["trace"]["prompts_capped"] == 4
    assert report["trace"]["outputs_capped"] == 4
    assert "capped: 4 prompts and 4 outputs" in result.stderr
    assert report["tokens"]["prompt"] == 37 + 5 + 50 + 50 + 1 + 50 + 18 + 50


def test_limit_and_quiet():
    result = run(CHAT, "--speed", "max", "--limit", "2", "--quiet")
    assert result.stderr == ""
    assert "2 of 2 requests finished" in result.stdout


def test_the_command_is_kept_without_folders(monkeypatch, tmp_path):
    plot = tmp_path / "out.png"
    arguments = [
        "bench",
        "trace",
        CHAT,
        f"--plot={plot}",
        "--set",
        "model.path=a/b",
        "--limit",
        "1",
    ]
    monkeypatch.setattr(sys, "argv", ["/usr/bin/ssmcore", *arguments])
    assert command_line() == (
        "ssmcore bench trace chat_small.csv --plot=out.png --set model.path=a/b --limit 1"
    )
    report = run(CHAT, "--limit", "1", "--json").stdout
    assert str(DATA) not in report


def test_plot_draws_a_picture(tmp_path):
    path = tmp_path / "out.png"
    result = run(CHAT, "--limit", "2", "--speed", "max", "--plot", str(path))
    assert result.exit_code == 0
    assert path.read_bytes().startswith(b"\x89PNG")


def test_plot_without_matplotlib_names_the_extra_before_anything_runs(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "matplotlib.backends.backend_agg", None)
    result = run(CHAT, "--plot", str(tmp_path / "out.png"))
    assert result.exit_code == 1
    assert 'pip install "ssmcore[plot]"' in result.stderr
    assert "model" not in result.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["absent.csv"], "absent.csv: No such file"),
        ([CHAT, "--speed", "0"], "--speed 0"),
        ([CHAT, "--speed", "nan"], "--speed nan"),
        ([CHAT, "--speed", "fast"], "--speed fast"),
        ([CHAT, "--plot", "x.docx"], "must end in one of"),
        ([CHAT, "--plot", "no/such/folder/x.png"], "there is no folder"),
        ([CHAT, "--set", "engine.max_model_len=1"], "engine.max_model_len = 1"),
    ],
)
def test_a_replay_that_cannot_be_is_refused(arguments, message):
    result = run(*arguments)
    assert result.exit_code == 1
    assert message in result.stderr
    assert result.stdout == ""


def test_a_malformed_trace_names_file_and_line(tmp_path):
    path = tmp_path / "broken.csv"
    path.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n2026-01-05 18:00:00,5,x\n")
    result = run(str(path))
    assert result.exit_code == 1
    assert "broken.csv, line 2: GeneratedTokens 'x'" in result.stderr


def test_control_c_prints_what_was_measured_so_far(tmp_path):
    path = tmp_path / "slow.csv"
    rows = "".join(f"2026-01-05 18:{at:02}:00,5,2\n" for at in range(10))
    path.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n" + rows)
    program = "from ssmcore.cli import main; main()"
    process = subprocess.Popen(
        [sys.executable, "-c", program, "bench", "trace", *SMALL, str(path)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert process.stderr is not None
    for line in process.stderr:
        if line.startswith(b"capped"):
            break
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(timeout=1)
    process.send_signal(signal.SIGINT)
    output, errors = process.communicate(timeout=30)
    assert process.returncode == 130
    assert b"1 of 10 requests finished" in output
    assert b"ended early, these are the figures so far" in output
    assert b"Traceback" not in errors
