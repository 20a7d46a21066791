from __future__ import annotations

import pytest
from strategy_builders import (
    CachePlugin,
    DecodePlugin,
    cache_record,
    decode_record,
    install,
    plugin_source,
)

import ssmcore
from ssmcore.errors import DuplicateStrategyError, PluginError, UnknownStrategyError
from ssmcore.registry import Registry
from ssmcore.strategies import SLOTS, StrategyOptions


@pytest.fixture
def site(tmp_path, monkeypatch):
    """A directory of `sys.path` to install distributions into."""
    monkeypatch.syspath_prepend(tmp_path / "site")
    return tmp_path / "site"


def refused(plugin, kind=PluginError):
    """The message with which a plugin of the distribution `loud-ssm 2.0` is refused."""
    with pytest.raises(kind) as caught:
        Registry().register(plugin, name="loud", distribution="loud-ssm", version="2.0")
    text = str(caught.value)
    assert "loud-ssm 2.0" in text
    return text


def test_bundled_strategies_come_in_through_entry_points():
    registry = Registry.load()
    assert registry.broken == []
    for slot in SLOTS:
        assert registry.records(slot)
    assert registry.get("decode", "baseline").distribution == "ssmcore"
    assert registry.get("decode", "baseline").version == ssmcore.__version__


def test_a_registered_strategy_knows_its_distribution():
    registry = Registry()
    record = decode_record("loud")
    registry.register(DecodePlugin(record), distribution="loud-ssm", version="2.0")
    entry = registry.get("decode", "loud")
    assert (entry.record, entry.origin) == (record, "loud-ssm 2.0")
    assert [entry.record.name for entry in registry.records("decode")] == ["loud"]
    assert registry.records("cache") == []


def test_slots_have_names_of_their_own():
    registry = Registry([DecodePlugin(decode_record("x")), CachePlugin(cache_record("x"))])
    assert registry.get("decode", "x") != registry.get("cache", "x")


def test_an_installed_distribution_is_found(site):
    install(site, "loud-ssm", "loud_ssm", plugin_source("loud"), version="2.0")
    assert Registry.load().get("decode", "loud").origin == "loud-ssm 2.0"


def test_two_distributions_with_one_name_are_both_named(site):
    install(site, "loud-ssm", "loud_ssm_one", plugin_source("loud"))
    install(site, "louder-ssm", "loud_ssm_two", plugin_source("loud"), version="3.0")
    with pytest.raises(DuplicateStrategyError) as caught:
        Registry.load()
    for word in ("decode", "'loud'", "loud-ssm 1.0", "louder-ssm 3.0", "uninstall"):
        assert word in str(caught.value)


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("import no_such_module_at_all", "No module named 'no_such_module_at_all'"),
        ("raise SystemExit('bye')", "SystemExit: bye"),
        ("def broken(:", "SyntaxError"),
    ],
)
def test_a_plugin_that_fails_to_import_is_kept_aside(site, source, words):
    install(site, "broken-ssm", "broken_ssm", source)
    registry = Registry.load()
    (broken,) = registry.broken
    assert (broken.name, broken.distribution, broken.version) == (
        "broken_ssm",
        "broken-ssm",
        "1.0",
    )
    assert words in broken.error
    assert registry.get("decode", "baseline")


def test_an_unknown_name_tells_of_plugins_that_failed_to_import(site):
    install(site, "broken-ssm", "broken_ssm", "import no_such_module_at_all")
    with pytest.raises(UnknownStrategyError) as caught:
        Registry.load().get("decode", "loud")
    for word in ("broken_ssm", "broken-ssm 1.0", "no_such_module_at_all"):
        assert word in str(caught.value)
    assert isinstance(caught.value.__cause__, ModuleNotFoundError)


def test_an_unknown_name_lists_the_known_and_the_nearest():
    registry = Registry([DecodePlugin(decode_record("baseline"), decode_record("loud"))])
    with pytest.raises(UnknownStrategyError) as caught:
        registry.get("decode", "basline")
    for word in ("decode.name = 'basline'", "did you mean 'baseline'?", "baseline, loud"):
        assert word in str(caught.value)


@pytest.mark.parametrize(
    ("returned", "words"),
    [
        (["loud"], ("DecodeAlgorithmRecord", "'loud'")),
        ([None], ("DecodeAlgorithmRecord", "None")),
        ([cache_record("loud")], ("DecodeAlgorithmRecord", "CacheModeRecord")),
        (decode_record("loud"), ("iterable", "DecodeAlgorithmRecord")),
        (None, ("iterable", "None")),
        ([decode_record("")], ("name", "''")),
        ([decode_record(3)], ("name", "3")),
        ([decode_record("loud", options=dict)], ("StrategyOptions", "dict")),
        ([decode_record("loud", options=StrategyOptions())], ("StrategyOptions",)),
        ([decode_record("loud", create=None)], ("create", "callable")),
        ([decode_record("loud", unavailable="never")], ("unavailable", "callable")),
    ],
)
def test_what_is_no_record_is_named_with_its_plugin(returned, words):
    class Plugin:
        @ssmcore.hookimpl
        def ssmcore_decode_algorithms(self):
            return returned

    text = refused(Plugin())
    for word in ("'loud'", "ssmcore_decode_algorithms", *words):
        assert word in text


def test_a_hook_that_raises_is_named_with_its_plugin():
    class Plugin:
        @ssmcore.hookimpl
        def ssmcore_decode_algorithms(self):
            yield decode_record("loud")
            raise KeyError("gone")

    text = refused(Plugin())
    for word in ("ssmcore_decode_algorithms", "KeyError", "gone"):
        assert word in text


def test_a_hook_that_does_not_exist_names_the_nearest():
    class Plugin:
        @ssmcore.hookimpl
        def ssmcore_decode_algorithm(self):
            return []

    text = refused(Plugin())
    assert "'ssmcore_decode_algorithm'" in text
    assert "did you mean 'ssmcore_decode_algorithms'?" in text


def test_a_hook_with_arguments_is_refused():
    class Plugin:
        @ssmcore.hookimpl
        def ssmcore_decode_algorithms(self, settings):
            return []

    assert "settings" in refused(Plugin())


def test_a_plugin_without_hooks_is_told_to_decorate_them():
    class Plugin:
        def ssmcore_decode_algorithms(self):
            return []

    assert "@ssmcore.hookimpl" in refused(Plugin())


def test_a_plugin_is_registered_once():
    plugin = DecodePlugin(decode_record("loud"))
    registry = Registry([plugin])
    with pytest.raises(PluginError, match="same object"):
        registry.register(plugin, distribution="loud-ssm")


def test_options_may_not_hide_core_keys():
    class Options(StrategyOptions):
        memory: int = 3

    text = refused(CachePlugin(cache_record("loud", options=Options)))
    assert "cache.memory" in text
    Registry([DecodePlugin(decode_record("loud", options=Options))])


def test_observers_are_collected():
    class Listener:
        def step_planned(self, plan): ...

        def step_run(self, plan, seconds): ...

    listener = Listener()

    class Plugin:
        @ssmcore.hookimpl
        def ssmcore_observers(self):
            return [listener]

    assert Registry([Plugin()]).observers() == (listener,)
    assert Registry().observers() == ()


def test_an_observer_that_cannot_listen_is_refused():
    class Plugin:
        @ssmcore.hookimpl
        def ssmcore_observers(self):
            return [print]

    text = refused(Plugin())
    assert "ssmcore_observers" in text
    assert "step_planned" in text
