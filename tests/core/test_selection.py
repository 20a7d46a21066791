from __future__ import annotations

from typing import Literal

import pytest
from pydantic import Field as Option
from ssmcore_plugins import cache_none, decode_first, graph_none
from strategy_builders import (
    CachePlugin,
    DecodePlugin,
    RememberingDecode,
    cache_record,
    decode_record,
    refusing_decode,
)

from ssmcore.errors import (
    CombinationError,
    PluginError,
    SettingsError,
    UnavailableError,
    UnknownOptionError,
    UnknownStrategyError,
)
from ssmcore.registry import Registry
from ssmcore.selection import STATIC_DECODE, select
from ssmcore.settings import Settings
from ssmcore.settings_sources import Source
from ssmcore.strategies import Conflict, Limits, MixerShape, StrategyOptions


class LoudOptions(StrategyOptions):
    every: int = Option(default=4, ge=1, le=9, strict=True)
    tone: Literal["low", "1"] = "low"


class NeedyOptions(StrategyOptions):
    need: int


CONFLICT = Conflict("decode.name = 'fussy'", "cache.name = 'none'", "it is fussy", "cache 'align'")


def registry_of(*records):
    """The bundled strategies and further decode algorithms of `loud-ssm 2.0`."""
    registry = Registry.load()
    if records:
        registry.register(DecodePlugin(*records), distribution="loud-ssm", version="2.0")
    return registry


def no_gpu(device):
    return None if device == "cuda" else "it needs a GPU: install one"


def chosen(*overrides, records=(), environ=None, **arguments):
    settings = Settings.load(None, overrides, environ or {})
    return select(settings, registry_of(*records), **arguments)


def refusal(kind, *overrides, **arguments):
    with pytest.raises(kind) as caught:
        chosen(*overrides, **arguments)
    return str(caught.value)


def test_strategies_get_their_validated_options_and_the_limits():
    selection = chosen(
        "decode.name=loud",
        "decode.every=8",
        "engine.max_num_seqs=3",
        "engine.num_spec_tokens=2",
        "model.chunk_size=16",
        records=[decode_record("loud", LoudOptions)],
    )
    assert selection.decode.options == LoudOptions(every=8)
    assert selection.decode.context.limits == selection.limits
    assert selection.limits == Limits(max_num_seqs=3, num_spec_tokens=2, chunk_size=16)
    assert selection.names == {
        "classifier": "decode-first",
        "cache": "none",
        "decode": "loud",
        "graph": "none",
    }


def test_limits_are_those_of_the_settings_unless_changed():
    assert chosen().limits == Limits()


def test_planning_takes_the_static_decode_algorithm_and_asks_nothing_of_the_machine():
    def unavailable(device):
        raise AssertionError

    records = [decode_record("loud", preference=99, unavailable=unavailable)]
    selection = chosen(records=records)
    assert selection.names["decode"] == STATIC_DECODE
    assert (selection.running, selection.device, selection.mixer) == (False, None, None)
    assert chosen("decode.name=loud", records=records, device="cpu").device is None


def test_running_tells_strategies_the_device_and_the_mixer():
    mixer = MixerShape(heads=2, headdim=4, dstate=8, groups=1, d_conv=4)
    asked = []
    record = decode_record("loud", unavailable=asked.append)
    selection = chosen(
        "decode.name=loud",
        records=[record],
        running=True,
        device="cuda:1",
        mixer=mixer,
    )
    assert (selection.running, selection.device, selection.mixer) == (True, "cuda:1", mixer)
    assert asked == ["cuda"]


def test_running_takes_the_chunk_size_of_the_model_and_says_so():
    selection = chosen(
        "decode.name=baseline", "model.chunk_size=16", running=True, device="cpu", chunk_size=32
    )
    assert selection.limits.chunk_size == 32
    (note,) = selection.notes
    for word in ("model.chunk_size = 16", "--set", "32"):
        assert word in note


def test_running_without_a_device_takes_that_of_the_settings():
    assert chosen("engine.device=cpu", running=True).device == "cpu"


def test_running_takes_the_most_preferred_algorithm_that_runs_here():
    records = [
        decode_record("second", preference=98),
        decode_record("best", preference=99, unavailable=no_gpu),
        decode_record("last", preference=97),
    ]
    selection = chosen(records=records, running=True, device="cpu")
    assert selection.names["decode"] == "second"
    assert selection.notes == (
        "decode.name is not set: second is the best that runs here",
        "not best: it needs a GPU: install one",
    )
    assert chosen(records=records, running=True, device="cuda").names["decode"] == "best"


def test_running_passes_over_an_algorithm_that_refuses_the_others():
    records = [decode_record("fussy", create=refusing_decode(CONFLICT), preference=99)]
    selection = chosen(records=records, running=True, device="cpu")
    assert selection.names["decode"] == STATIC_DECODE
    assert any("fussy" in note and "it is fussy" in note for note in selection.notes)


def test_running_passes_over_an_algorithm_that_does_not_know_the_options():
    records = [decode_record("loud", LoudOptions, preference=-99), decode_record("deaf")]
    selection = chosen("decode.every=3", records=records, running=True, device="cpu")
    assert selection.names["decode"] == "loud"
    assert selection.decode.options.every == 3


def test_running_says_why_no_algorithm_can():
    algorithms = DecodePlugin(
        decode_record("first", unavailable=no_gpu),
        decode_record("second", unavailable=lambda device: "it needs more"),
    )
    registry = Registry([decode_first, cache_none, graph_none, algorithms])
    with pytest.raises(UnavailableError) as caught:
        select(Settings.from_dict({}), registry, running=True, device="cpu")
    for word in ("decode.name", "first", "install one", "second", "it needs more"):
        assert word in str(caught.value)


def test_a_conflict_that_no_algorithm_solves_is_said_once():
    class Refusing(type(chosen().cache)):
        def check(self, selection):
            return Conflict("cache.name = 'no'", "engine.seed = 0", "of principle", "seed 1")

    registry = registry_of()
    registry.register(CachePlugin(cache_record("no", create=Refusing)))
    settings = Settings.from_dict({"cache": {"name": "no"}})
    with pytest.raises(CombinationError) as caught:
        select(settings, registry, running=True, device="cpu")
    assert str(caught.value).count("of principle") == 1


def test_a_named_algorithm_that_cannot_run_here_says_what_to_install():
    records = [decode_record("loud", unavailable=no_gpu)]
    text = refusal(
        UnavailableError, "decode.name=loud", records=records, running=True, device="cpu"
    )
    for word in ("decode.name = 'loud'", "cpu", "it needs a GPU: install one"):
        assert word in text
    assert chosen("decode.name=loud", records=records, running=True, device="cuda")


def test_a_record_that_fails_to_tell_whether_it_runs_cannot():
    def unavailable(device):
        raise ImportError("libfoo.so")

    records = [decode_record("loud", unavailable=unavailable, preference=99)]
    text = refusal(
        UnavailableError, "decode.name=loud", records=records, running=True, device="cpu"
    )
    for word in ("loud-ssm 2.0", "ImportError", "libfoo.so"):
        assert word in text
    assert chosen(records=records, running=True, device="cpu").names["decode"] != "loud"


def test_a_conflict_names_both_settings_the_reason_and_what_works():
    records = [decode_record("fussy", create=refusing_decode(CONFLICT))]
    text = refusal(CombinationError, "decode.name=fussy", records=records)
    for word in ("decode.name = 'fussy'", "cache.name = 'none'", "it is fussy", "cache 'align'"):
        assert word in text


def test_replay_and_speculative_tokens_name_what_works_instead():
    text = refusal(CombinationError, "decode.name=replay-torch", "engine.num_spec_tokens=2")
    for word in ("decode.name", "replay-torch", "engine.num_spec_tokens", "baseline"):
        assert word in text


def test_an_unknown_name_is_refused():
    text = refusal(UnknownStrategyError, "cache.name=alling")
    for word in ("cache.name = 'alling'", "align", "all", "none"):
        assert word in text


def test_an_unknown_option_names_the_key_its_source_and_the_nearest():
    records = [decode_record("loud", LoudOptions)]
    text = refusal(UnknownOptionError, "decode.name=loud", "decode.evry=3", records=records)
    for word in ("--set", "decode.evry", "'loud'", "did you mean 'every'?", "tone"):
        assert word in text


def test_an_unknown_option_names_the_strategies_that_have_it():
    text = refusal(UnknownOptionError, "cache.block_size=8")
    for word in ("cache.block_size", "'none' (default)", "align", "all"):
        assert word in text


RECORDS = [decode_record("loud", LoudOptions), decode_record("quiet")]


def layered(*layers):
    sources = [Source(f"source {n}", {"decode": layer}) for n, layer in enumerate(layers, 1)]
    return select(Settings.from_sources(sources), registry_of(*RECORDS))


def test_an_option_of_the_strategy_that_a_higher_source_replaced_is_left_out_and_said():
    selection = layered({"name": "loud", "every": 8}, {"name": "quiet"})
    assert selection.decode.options == StrategyOptions()
    (note,) = selection.notes
    for word in ("decode.every", "source 1", "left out", "'quiet'", "source 2"):
        assert word in note


@pytest.mark.parametrize(
    "layers",
    [
        ({"name": "quiet", "every": 8},),
        ({"name": "quiet"}, {"every": 8}),
        ({"name": "loud", "every": 7}, {"name": "quiet", "every": 8}),
        ({"name": "loud", "every": 7}, {"name": "quiet"}, {"every": 8}),
        ({"every": 8},),
    ],
)
def test_an_unknown_option_from_the_source_of_the_name_or_a_higher_one_is_refused(layers):
    with pytest.raises(UnknownOptionError, match=r"decode\.every"):
        layered(*layers)


def test_an_option_that_the_new_strategy_knows_too_is_kept():
    selection = layered({"name": "quiet", "every": 8}, {"name": "loud"})
    assert selection.decode.options.every == 8
    assert selection.notes == ()


@pytest.mark.parametrize("value", ["true", "1.0", "'8'", "eight", "0", "10"])
def test_a_wrong_option_names_key_value_and_source(value):
    text = refusal(
        SettingsError,
        "decode.name=loud",
        records=RECORDS,
        environ={"SSMCORE_DECODE__EVERY": value},
    )
    assert text.startswith("environment SSMCORE_DECODE__EVERY: decode.every = ")
    assert "must be" in text


def test_an_option_that_is_text_takes_what_reads_as_a_number():
    selection = chosen("decode.name=loud", "decode.tone=1", records=RECORDS)
    assert selection.decode.options.tone == "1"
    text = refusal(SettingsError, "decode.name=loud", "decode.tone=2", records=RECORDS)
    for word in ("decode.tone", "'2'", "'low'"):
        assert word in text


def test_an_option_that_must_be_set_is_asked_for():
    records = [decode_record("needy", NeedyOptions)]
    assert "decode.need must be set" in refusal(SettingsError, "decode.name=needy", records=records)


def test_a_strategy_that_cannot_be_created_is_named_with_its_distribution():
    def create(options, context):
        raise ZeroDivisionError("by nought")

    text = refusal(PluginError, "decode.name=loud", records=[decode_record("loud", create=create)])
    for word in ("'loud'", "loud-ssm 2.0", "ZeroDivisionError", "by nought"):
        assert word in text


def test_a_strategy_that_lacks_what_its_protocol_asks_is_refused_at_once():
    class Lacking:
        exact = True

        def __init__(self, options, context): ...

    text = refusal(PluginError, "decode.name=loud", records=[decode_record("loud", create=Lacking)])
    for word in ("'loud'", "loud-ssm 2.0", "error_bound", "plan_fields", "DecodeAlgorithm"):
        assert word in text


def test_a_check_that_raises_is_named_with_its_distribution():
    class Raising(RememberingDecode):
        def check(self, selection):
            return selection.mixer.heads

    text = refusal(PluginError, "decode.name=loud", records=[decode_record("loud", create=Raising)])
    for word in ("'loud'", "loud-ssm 2.0", "check", "AttributeError"):
        assert word in text


def test_options_of_a_plugin_are_strict_without_its_saying_so():
    from pydantic import ValidationError

    from ssmcore.strategies import StrategyOptions

    class Options(StrategyOptions):
        every: int = 4

    assert Options(every=5).every == 5
    for wrong in (True, 2.0, "5"):
        with pytest.raises(ValidationError):
            Options(every=wrong)
