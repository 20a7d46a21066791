from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
from strategy_builders import install, plugin_source
from typer.testing import CliRunner

from ssmcore import __version__
from ssmcore.cli import app


@pytest.fixture(autouse=True)
def directory(tmp_path, monkeypatch):
    """An empty working directory, and an environment without settings."""
    for name in os.environ:
        if name.startswith("SSMCORE_"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("SSMCORE_ENGINE__DEVICE", "cpu")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def loud(tmp_path, monkeypatch):
    """The distribution `loud-ssm` with the decode algorithm `loud`, installed."""
    monkeypatch.syspath_prepend(tmp_path / "site")
    install(tmp_path / "site", "loud-ssm", "loud_ssm", plugin_source("loud"))


def run(*arguments):
    return CliRunner().invoke(app, arguments)


def shown(*arguments):
    """`config show --json`, its settings by key."""
    result = run("config", "show", "--json", *arguments)
    assert result.exit_code == 0, result.output
    answer = json.loads(result.stdout)
    answer["settings"] = {row["key"]: (row["value"], row["source"]) for row in answer["settings"]}
    return answer


def refused(*arguments):
    result = run(*arguments)
    assert result.exit_code == 1
    assert result.stdout == ""
    assert result.stderr.startswith("error: ")
    return result.stderr


def test_version():
    result = run("--version")
    assert (result.exit_code, result.stdout) == (0, f"ssmcore {__version__}\n")


def test_show_prints_every_value_and_its_source(directory, monkeypatch):
    (directory / "ssmcore.toml").write_text("[engine]\nmax_num_seqs = 8\n")
    monkeypatch.setenv("SSMCORE_MODEL__DTYPE", "float16")
    settings = shown("--set", "engine.seed=3")["settings"]
    assert settings["engine.max_num_seqs"] == (8, "ssmcore.toml")
    assert settings["model.dtype"] == ("float16", "environment SSMCORE_MODEL__DTYPE")
    assert settings["engine.seed"] == (3, "--set")
    assert settings["cache.memory"] == ("auto", "default")


def test_show_reads_the_file_that_is_named(directory):
    (directory / "other.toml").write_text("[engine]\nseed = 9\n")
    settings = shown("--config", "other.toml")["settings"]
    assert settings["engine.seed"] == (9, "other.toml")


def test_show_has_the_options_of_the_chosen_strategies():
    settings = shown("--set", "cache.name=align")["settings"]
    assert settings["cache.block_size"] == (256, "default")


def test_show_says_which_decode_algorithm_would_run_here():
    answer = shown()
    assert answer["settings"]["decode.name"] == ("baseline", "chosen here")
    assert any("baseline is the best that runs here" in note for note in answer["notes"])
    assert shown("--set", "decode.name=baseline")["settings"]["decode.name"][1] == "--set"


def test_show_tells_what_is_left_out(directory):
    (directory / "ssmcore.toml").write_text("[decode]\nname = 'replay-torch'\nbuffer_len = 8\n")
    answer = shown("--set", "decode.name=baseline")
    assert answer["left_out"] == [
        {"key": "decode.buffer_len", "value": 8, "source": "ssmcore.toml"}
    ]
    assert "decode.buffer_len" not in answer["settings"]
    assert "decode.buffer_len" in run("config", "show", "--set", "decode.name=baseline").stdout


def test_show_shows_what_cannot_run_and_why():
    answer = shown("--set", "engine.device=cuda:999")
    assert "cuda:999" in answer["problem"]
    assert answer["settings"]["decode.name"] == (None, "default")


def test_show_prints_values_as_they_are():
    assert '"[red]x[/red]"' in run("config", "show", "--set", "model.path=[red]x[/red]").stdout


def test_show_knows_a_third_partys_options(loud):
    settings = shown("--set", "decode.name=loud", "--set", "decode.every=8")["settings"]
    assert settings["decode.every"] == (8, "--set")
    assert settings["decode.tone"] == ("low", "default")


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("decode.name=basline", ("decode.name", "'basline'", "baseline", "replay-torch")),
        ("engine.max_num_seq=8", ("--set", "engine.max_num_seq", "'max_num_seqs'")),
        ("cache.block_size=8", ("--set", "cache.block_size", "align")),
        ("engine.max_num_seqs=1.0", ("--set", "engine.max_num_seqs", "1.0", "integer")),
        ("nonsense", ("--set", "nonsense", "KEY=VALUE")),
    ],
)
@pytest.mark.parametrize("command", ["show", "check"])
def test_a_bad_setting_is_one_message_and_status_1(command, override, words):
    text = refused("config", command, "--set", override)
    for word in words:
        assert word in text
    assert "Traceback" not in text


def test_a_missing_file_is_one_message():
    assert "missing.toml" in refused("config", "show", "--config", "missing.toml")


def test_debug_shows_the_traceback():
    command = [sys.executable, "-c", "from ssmcore.cli import main; main()"]
    result = subprocess.run(
        [*command, "--debug", "config", "show", "--set", "nonsense"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 1
    assert "Traceback" in result.stderr
    assert "KEY=VALUE" in result.stderr


def test_interruption_ends_with_status_130(monkeypatch):
    def load(*arguments):
        raise KeyboardInterrupt

    monkeypatch.setattr("ssmcore.settings.Settings.load", load)
    assert run("config", "show").exit_code == 130


def test_check_says_what_runs():
    result = run("config", "check", "--set", "cache.name=align", "--set", "decode.name=baseline")
    assert result.exit_code == 0
    for word in ("ok", "decode-first", "align", "baseline", "cpu"):
        assert word in result.stdout


def test_check_refuses_what_cannot_run_here(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    text = refused("config", "check", "--set", "decode.name=replay-triton")
    for word in ("replay-triton", "cpu"):
        assert word in text


def test_check_refuses_a_device_that_is_not_here():
    assert "cuda:999" in refused("config", "check", "--set", "engine.device=cuda:999")


def test_check_refuses_an_impossible_combination():
    overrides = ("decode.name=replay-torch", "engine.num_spec_tokens=2")
    text = refused("config", "check", *(part for text in overrides for part in ("--set", text)))
    for word in ("replay-torch", "engine.num_spec_tokens", "what works"):
        assert word in text


def model_directory(path, **sizes):
    """A directory with the configuration of a small model."""
    path.mkdir()
    values = {
        "model_type": "mamba2",
        "vocab_size": 256,
        "hidden_size": 8,
        "num_hidden_layers": 1,
        "num_heads": 4,
        "head_dim": 4,
        "state_size": 8,
        "n_groups": 1,
        "conv_kernel": 4,
        "expand": 2,
        **sizes,
    }
    (path / "config.json").write_text(json.dumps(values))


def test_check_looks_at_the_chunk_size_of_a_model_in_a_directory(directory):
    model_directory(directory / "model", chunk_size=24)
    overrides = ("model.path=model", "cache.name=all", "cache.block_size=32")
    arguments = [part for text in overrides for part in ("--set", text)]
    text = refused("config", "check", *arguments)
    for word in ("cache.block_size = 32", "24"):
        assert word in text
    assert run("config", "check", *arguments, "--set", "cache.block_size=48").exit_code == 0


def test_schema_has_every_installed_strategy_and_its_options(loud):
    result = run("config", "schema")
    assert result.exit_code == 0
    sections = json.loads(result.stdout)["properties"]
    assert list(sections) == ["model", "engine", "classifier", "cache", "decode", "graph"]
    assert sections["engine"]["properties"]["max_num_seqs"]["minimum"] == 1
    decode = {part["title"]: part for part in sections["decode"]["anyOf"]}
    assert decode["loud"]["properties"]["every"] == {
        "default": 4,
        "description": "Speak once in so many steps.",
        "maximum": 9,
        "minimum": 1,
        "title": "Every",
        "type": "integer",
    }
    assert decode["loud"]["properties"]["name"]["const"] == "loud"
    assert decode["loud"]["additionalProperties"] is False
    assert "buffer_len" in decode["replay-torch"]["properties"]
    cache = {part["title"]: part for part in sections["cache"]["anyOf"]}
    assert "memory" in cache["align"]["properties"]
    assert "required" not in cache["none"]
    assert cache["align"]["required"] == ["name"]


def test_help_config_and_plugins_do_not_load_torch():
    program = """
import sys
from typer.testing import CliRunner
from ssmcore.cli import app

commands = ["--help", "config show", "config check", "config schema", "plugins list",
            "plugins show baseline"]
for command in commands:
    result = CliRunner().invoke(app, command.split())
    assert result.exit_code == 0, (command, result.output)
    assert "torch" not in sys.modules, command
"""
    subprocess.run([sys.executable, "-c", program], check=True)
