from __future__ import annotations

import pytest

from ssmcore.errors import SettingsError, UnknownOptionError
from ssmcore.settings import DEFAULT_NAMES, Memory, Settings, parse_memory


@pytest.fixture
def directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def load(*overrides, config=None, **environ):
    return Settings.load(config, overrides, environ)


def message(kind, *overrides, config=None, **environ):
    with pytest.raises(kind) as caught:
        load(*overrides, config=config, **environ)
    return str(caught.value)


def test_defaults_choose_the_plain_strategies_and_leave_decode_open():
    settings = Settings.from_dict({})
    assert DEFAULT_NAMES == {
        "classifier": "decode-first",
        "cache": "none",
        "decode": None,
        "graph": "none",
    }
    assert settings.model.path == "quickstart"
    assert settings.engine.max_num_seqs == 64
    assert settings.source_of("engine.max_num_seqs") == "default"


def test_later_sources_win_and_each_value_knows_its_own(directory):
    (directory / "ssmcore.toml").write_text(
        "[engine]\nmax_num_seqs = 1\nmax_model_len = 1\nseed = 1\n"
    )
    settings = load("engine.seed=3", SSMCORE_ENGINE__SEED="2", SSMCORE_ENGINE__MAX_MODEL_LEN="2")
    engine = settings.engine
    assert (engine.max_num_seqs, engine.max_model_len, engine.seed) == (1, 2, 3)
    assert settings.source_of("engine.max_num_seqs") == "ssmcore.toml"
    assert settings.source_of("engine.max_model_len") == (
        "environment SSMCORE_ENGINE__MAX_MODEL_LEN"
    )
    assert settings.source_of("engine.seed") == "--set"
    ranks = [settings.rank_of(f"engine.{key}") for key in ("max_num_seqs", "max_model_len", "seed")]
    assert ranks == sorted(set(ranks))
    assert settings.rank_of("engine.device") == 0


def test_the_last_of_two_overrides_wins():
    assert load("engine.seed=1", "engine.seed=2").engine.seed == 2


def test_a_named_file_is_read_instead_of_the_one_in_the_working_directory(directory):
    (directory / "ssmcore.toml").write_text("[engine]\nmax_num_seqs = 1\n")
    other = directory / "other.toml"
    other.write_text("[engine]\nseed = 7\n")
    settings = load(config=other)
    assert (settings.engine.max_num_seqs, settings.engine.seed) == (64, 7)
    assert settings.source_of("engine.seed") == str(other)


def test_options_stand_flat_beside_the_name_as_given():
    settings = load("cache.name=align", "cache.block_size=8", "cache.memory=0.5")
    assert settings.cache.name == "align"
    assert settings.cache.options == {"block_size": 8}
    assert settings.cache.memory_amount == Memory(fraction=0.5)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("8", 8),
        ("1.5", 1.5),
        ("true", True),
        ("[1, 2]", [1, 2]),
        ("low", "low"),
        ('"8"', "8"),
        ("4 GiB", "4 GiB"),
        ("", ""),
        ("a=b", "a=b"),
        ("8\n[engine]", "8\n[engine]"),
        ("8\nseed = 1", "8\nseed = 1"),
        ("[" * 5000, "[" * 5000),
        ("9" * 5000, "9" * 5000),
    ],
    ids=lambda value: repr(value)[:20],
)
def test_an_override_is_toml_and_anything_else_is_text(text, value):
    got = load(f"decode.x={text}").decode.options["x"]
    assert (got, type(got)) == (value, type(value))
    from_environment = load(SSMCORE_DECODE__X=text).decode.options["x"]
    assert from_environment == value


@pytest.mark.parametrize("text", ["2024", "1.0", "true", "1979-05-27", "[a]", "1#2"])
def test_text_that_reads_as_a_number_is_text_where_text_is_wanted(text):
    settings = load(f"model.path={text}", SSMCORE_MODEL__REVISION=text)
    assert settings.model.path == text
    assert settings.model.revision == text


def test_a_number_in_a_file_is_no_text(directory):
    (directory / "ssmcore.toml").write_text("[model]\npath = 2024\n")
    assert "model.path = 2024: must be a valid string" in message(SettingsError)


@pytest.mark.parametrize("value", ["true", "1.0", "'8'", "many", "0", "-1", str(2**31), "[]"])
def test_counts_are_whole_numbers_within_bounds(value):
    text = message(SettingsError, f"engine.max_num_seqs={value}")
    assert text.startswith("--set: engine.max_num_seqs = ")
    assert "must be" in text


def test_a_wrong_type_names_key_value_type_and_source(directory):
    (directory / "ssmcore.toml").write_text("[engine]\nmax_num_seqs = '8'\n")
    assert message(SettingsError) == (
        "ssmcore.toml: engine.max_num_seqs = '8': must be a valid integer"
    )
    text = message(SettingsError, SSMCORE_ENGINE__MAX_NUM_SEQS="eight")
    assert text.startswith(
        "environment SSMCORE_ENGINE__MAX_NUM_SEQS: engine.max_num_seqs = 'eight'"
    )


def test_a_choice_names_all_choices():
    text = message(SettingsError, "model.dtype=fp16")
    for word in ("--set", "model.dtype", "'fp16'", "'auto'", "'bfloat16'", "'float16'"):
        assert word in text


@pytest.mark.parametrize("device", ["auto", "cpu", "cuda", "cuda:0", "cuda:12"])
def test_devices(device):
    assert load(f"engine.device={device}").engine.device == device


@pytest.mark.parametrize("device", ["gpu", "cuda:", "cuda:-1", "cpu:0", "cuda:٣", "cuda:0\n", ""])
def test_no_devices(device):
    assert "engine.device" in message(SettingsError, f'engine.device="{device}"')


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ({"overrides": ["engine.max_num_seq=8"]}, ("--set", "engine.max_num_seq")),
        (
            {"environ": {"SSMCORE_ENGINE__MAX_NUM_SEQ": "8"}},
            ("environment SSMCORE_ENGINE__MAX_NUM_SEQ", "engine.max_num_seq"),
        ),
        ({"file": "[engine]\nmax_num_seq = 8\n"}, ("ssmcore.toml", "engine.max_num_seq")),
    ],
    ids=["override", "environment", "file"],
)
def test_an_unknown_setting_names_itself_its_source_and_the_nearest(directory, source, words):
    if "file" in source:
        (directory / "ssmcore.toml").write_text(source["file"])
    text = message(UnknownOptionError, *source.get("overrides", ()), **source.get("environ", {}))
    for word in (*words, "did you mean 'max_num_seqs'?"):
        assert word in text


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ({"overrides": ["decod.name=x"]}, ("--set", "'decod'")),
        ({"environ": {"SSMCORE_DECOD__NAME": "x"}}, ("SSMCORE_DECOD__NAME", "'decod'")),
        ({"file": "[decod]\nname = 'x'\n"}, ("ssmcore.toml", "'decod'")),
        ({"file": "[decod]\n"}, ("ssmcore.toml", "'decod'")),
    ],
)
def test_an_unknown_section_names_the_nearest(directory, source, words):
    if "file" in source:
        (directory / "ssmcore.toml").write_text(source["file"])
    text = message(UnknownOptionError, *source.get("overrides", ()), **source.get("environ", {}))
    for word in (*words, "did you mean 'decode'?"):
        assert word in text


@pytest.mark.parametrize("key", ["decode", "decode.", "decode.a.b"])
def test_an_override_names_a_section_and_one_key(key):
    text = message(UnknownOptionError, f"{key}=1")
    assert f"--set {key}" in text
    assert "decode.name" in text


def test_an_override_needs_an_equals_sign():
    assert "KEY=VALUE" in message(SettingsError, "decode.name")


def test_a_variable_without_a_section_is_refused():
    text = message(UnknownOptionError, SSMCORE_DEVICE="cpu")
    assert "SSMCORE_DEVICE" in text
    text = message(UnknownOptionError, SSMCORE_DECODE="baseline")
    assert "SSMCORE_DECODE__NAME" in text


def test_a_file_that_is_not_there_is_an_error(directory):
    missing = directory / "missing.toml"
    assert str(missing) in message(SettingsError, config=missing)
    assert str(directory) in message(SettingsError, config=directory)


@pytest.mark.parametrize(
    "content", [b"[engine\n", b"\xff\xfe", b"[engine]\nseed = " + b"[" * 5000, b"engine = 8\n"]
)
def test_a_file_that_cannot_be_read_is_named(directory, content):
    (directory / "ssmcore.toml").write_bytes(content)
    assert "ssmcore.toml: " in message(SettingsError)


@pytest.mark.parametrize(
    ("text", "memory"),
    [
        ("auto", Memory()),
        ("4 GiB", Memory(nbytes=4 * 2**30)),
        ("512MiB", Memory(nbytes=512 * 2**20)),
        ("1.5 GB", Memory(nbytes=1_500_000_000)),
        ("100 b", Memory(nbytes=100)),
        ("0.8", Memory(fraction=0.8)),
        ("1", Memory(fraction=1.0)),
    ],
)
def test_amounts_of_memory(text, memory):
    assert parse_memory(text) == memory
    assert load(f"cache.memory={text}").cache.memory_amount == memory


@pytest.mark.parametrize(
    "text", ["", "0", "1.5", "-1 GiB", "GiB", "4 GiX", "nan", "inf GiB", "0.5 B", "80%", "9e99 TB"]
)
def test_no_amounts_of_memory(text):
    text = message(SettingsError, f'cache.memory="{text}"')
    assert "cache.memory" in text
    assert "4 GiB" in text


def test_a_bare_number_of_bytes_in_a_file_needs_a_unit(directory):
    (directory / "ssmcore.toml").write_text("[cache]\nmemory = 4294967296\n")
    assert "cache.memory = 4294967296" in message(SettingsError)


@pytest.mark.parametrize("values", [[], "x", {"engine": []}, {"engine": None}, {1: {}}])
def test_a_mapping_that_holds_no_sections_is_refused(values):
    with pytest.raises(SettingsError, match="case 7"):
        Settings.from_dict(values, source="case 7")


def test_settings_cannot_be_changed():
    settings = Settings.from_dict({})
    with pytest.raises(ValueError, match="frozen"):
        settings.engine.seed = 3
