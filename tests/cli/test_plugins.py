from __future__ import annotations

import json
import os

import pytest
from strategy_builders import install, plugin_source
from typer.testing import CliRunner

from ssmcore import __version__
from ssmcore.cli import app


@pytest.fixture(autouse=True)
def site(tmp_path, monkeypatch):
    """A directory of `sys.path` to install distributions into; no settings from elsewhere."""
    for name in os.environ:
        if name.startswith(("SSMCORE_", "TRITON_INTERPRET")):
            monkeypatch.delenv(name)
    monkeypatch.setenv("SSMCORE_ENGINE__DEVICE", "cpu")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path / "site")
    return tmp_path / "site"


def run(*arguments):
    return CliRunner().invoke(app, ["plugins", *arguments])


def listed(*arguments):
    result = run("list", "--json", *arguments)
    assert result.exit_code == 0, result.output
    answer = json.loads(result.stdout)
    answer["strategies"] = {(row["slot"], row["name"]): row for row in answer["strategies"]}
    return answer


def shown(*arguments):
    result = run("show", "--json", *arguments)
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def test_list_says_where_strategies_come_from_and_which_are_selected():
    answer = listed("--set", "cache.name=align")
    assert answer["device"] == "cpu"
    baseline = answer["strategies"]["decode", "baseline"]
    assert (baseline["distribution"], baseline["version"]) == ("ssmcore", __version__)
    assert baseline["available"]
    selected = {key for key, row in answer["strategies"].items() if row["selected"]}
    assert selected == {
        ("classifier", "decode-first"),
        ("cache", "align"),
        ("decode", "baseline"),
        ("graph", "none"),
    }


def test_list_says_why_a_strategy_does_not_run_here():
    row = listed()["strategies"]["decode", "replay-triton"]
    assert not row["available"]
    assert row["reason"]


def test_list_marks_what_was_named_even_if_it_cannot_run_here():
    rows = listed("--set", "decode.name=replay-triton")["strategies"]
    assert rows["decode", "replay-triton"]["selected"]
    assert not rows["decode", "baseline"]["selected"]


def test_list_has_third_partys_strategies(site):
    install(site, "loud-ssm", "loud_ssm", plugin_source("loud"), version="2.0")
    row = listed()["strategies"]["decode", "loud"]
    assert (row["distribution"], row["version"]) == ("loud-ssm", "2.0")
    assert "loud-ssm 2.0" in run("list").stdout


def test_list_has_plugins_that_failed_to_import(site):
    install(site, "broken-ssm", "broken_ssm", "import no_such_module_at_all")
    (broken,) = listed()["broken"]
    assert (broken["name"], broken["distribution"]) == ("broken_ssm", "broken-ssm")
    assert "no_such_module_at_all" in broken["error"]
    result = run("list")
    assert result.exit_code == 0
    for word in ("broken_ssm", "broken-ssm 1.0", "no_such_module_at_all", "baseline"):
        assert word in result.stdout


def test_two_distributions_with_one_name_are_one_message(site):
    install(site, "loud-ssm", "loud_ssm_one", plugin_source("loud"))
    install(site, "louder-ssm", "loud_ssm_two", plugin_source("loud"))
    result = run("list")
    assert result.exit_code == 1
    for word in ("'loud'", "loud-ssm 1.0", "louder-ssm 1.0"):
        assert word in result.stderr


def test_show_lists_options_with_type_default_and_help(site):
    install(site, "loud-ssm", "loud_ssm", plugin_source("loud"))
    (strategy,) = shown("loud")
    assert (strategy["slot"], strategy["distribution"]) == ("decode", "loud-ssm")
    assert strategy["options"] == [
        {
            "name": "every",
            "type": "integer, 1 to 9",
            "default": 4,
            "required": False,
            "help": "Speak once in so many steps.",
        },
        {
            "name": "tone",
            "type": '"low" | "high"',
            "default": "low",
            "required": False,
            "help": "",
        },
    ]
    text = run("show", "loud").stdout
    for word in ("decode.every", "integer, 1 to 9", "Speak once", "loud-ssm 1.0"):
        assert word in text


def test_show_says_how_exact_results_are():
    assert "exact" in run("show", "baseline").stdout
    assert "relative error of at most" in shown("replay-flashinfer")[0]["results"]
    assert shown("align")[0]["results"] is None


def test_show_describes_a_name_in_every_slot_that_has_it():
    assert [strategy["slot"] for strategy in shown("none")] == ["cache", "graph"]
    assert [strategy["slot"] for strategy in shown("none", "--slot", "graph")] == ["graph"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("basline",), ("'basline'", "did you mean 'baseline'?")),
        (("baseline", "--slot", "cache"), ("'baseline'", "align")),
        (("baseline", "--slot", "decoder"), ("'decoder'", "decode")),
    ],
)
def test_show_of_an_unknown_name_is_one_message(arguments, words):
    result = run("show", *arguments)
    assert result.exit_code == 1
    for word in words:
        assert word in result.stderr


def test_show_of_an_unknown_name_tells_of_plugins_that_failed_to_import(site):
    install(site, "broken-ssm", "broken_ssm", "import no_such_module_at_all")
    assert "no_such_module_at_all" in run("show", "loud").stderr
