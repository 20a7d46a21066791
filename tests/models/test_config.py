"""Both formats of `config.json`, and everything that is no pure Mamba-2 model."""

from __future__ import annotations

import json
import math

import pytest

from ssmcore.errors import CheckpointError
from ssmcore.models.config import Mamba2Config

HUGGING_FACE = {
    "model_type": "mamba2",
    "vocab_size": 100,
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_heads": 8,
    "head_dim": 16,
    "state_size": 32,
    "n_groups": 2,
    "conv_kernel": 4,
    "expand": 2,
    "layer_norm_epsilon": 1e-6,
    "use_bias": True,
    "use_conv_bias": False,
    "residual_in_fp32": False,
    "tie_word_embeddings": True,
    "time_step_limit": [0.0, {"__float__": "Infinity"}],
    "eos_token_id": [0, 2],
}
ORIGINAL = {
    "d_model": 768,
    "n_layer": 24,
    "vocab_size": 50277,
    "ssm_cfg": {"layer": "Mamba2"},
    "rms_norm": True,
    "residual_in_fp32": True,
    "pad_vocab_size_multiple": 16,
}


def refused(values, *parts):
    with pytest.raises(CheckpointError) as caught:
        Mamba2Config.from_dict(values)
    for part in parts:
        assert part in str(caught.value)


def test_the_hugging_face_format_is_read():
    assert Mamba2Config.from_dict(HUGGING_FACE) == Mamba2Config(
        vocab_size=100,
        d_model=64,
        num_layers=3,
        heads=8,
        headdim=16,
        dstate=32,
        groups=2,
        norm_eps=1e-6,
        proj_bias=True,
        conv_bias=False,
        residual_in_fp32=False,
        tied_head=True,
        eos_token_ids=(0, 2),
    )


def test_the_original_format_is_read_with_its_defaults_and_padded_vocabulary():
    config = Mamba2Config.from_dict(ORIGINAL)
    assert (config.heads, config.headdim, config.dstate, config.groups) == (24, 64, 128, 1)
    assert (config.vocab_size, config.tied_head, config.conv_dim) == (50288, True, 1792)


def test_the_original_format_may_say_more():
    values = {**ORIGINAL, "tie_embeddings": False, "pad_vocab_size_multiple": 1}
    values["ssm_cfg"] = {"layer": "Mamba2", "d_state": 64, "ngroups": 4, "dt_limit": [0.1, 0.5]}
    config = Mamba2Config.from_dict(values)
    assert (config.dstate, config.groups, config.time_step_limit) == (64, 4, (0.1, 0.5))
    assert (config.vocab_size, config.tied_head) == (50277, False)


@pytest.mark.parametrize(
    "written", ['[0.0, {"__float__": "Infinity"}]', "[0.0, Infinity]", "[0, Infinity]", "null"]
)
def test_an_infinite_limit_is_read_in_every_form(written):
    values = {**HUGGING_FACE, "time_step_limit": json.loads(written)}
    assert Mamba2Config.from_dict(values).time_step_limit == (0.0, math.inf)


@pytest.mark.parametrize(
    "limit", [[0.1], "ab", [0.2, 0.1], [-1, 1], [0, {"__float__": "NaN"}], [math.nan, 1], [0, None]]
)
def test_a_limit_that_is_none_is_refused(limit):
    refused({**HUGGING_FACE, "time_step_limit": limit}, "time_step_limit")


@pytest.mark.parametrize(
    "key", [k for k in HUGGING_FACE if "size" in k or k.startswith(("num", "n_", "conv", "ex"))]
)
def test_a_missing_size_is_named(key):
    refused({k: v for k, v in HUGGING_FACE.items() if k != key}, key, "missing")


@pytest.mark.parametrize("value", [0, -1, 1.5, "64", True, [64]])
def test_a_size_that_is_no_positive_integer_is_refused(value):
    refused({**HUGGING_FACE, "hidden_size": value}, "hidden_size", repr(value))


@pytest.mark.parametrize(
    ("changes", "parts"),
    [
        ({"num_heads": 9}, ["128", "144"]),
        ({"n_groups": 3}, ["8 heads", "3 groups"]),
        ({"hidden_act": "gelu"}, ["hidden_act", "'gelu'"]),
        ({"use_bias": "yes"}, ["use_bias", "'yes'"]),
        ({"conv_kernel": 1}, ["convolution"]),
        ({"layer_norm_epsilon": None}, ["layer_norm_epsilon"]),
        ({"eos_token_id": "</s>"}, ["eos_token_id"]),
        ({"model_type": "mamba"}, ["'mamba'", "layer 0 is Mamba-1"]),
        ({"model_type": "llama"}, ["'llama'", "'mamba2'"]),
        (
            {"model_type": "bamba", "attn_layer_indices": [18, 9]},
            ["'bamba'", "layer 9 is attention"],
        ),
        ({"model_type": "nemotron_h", "hybrid_override_pattern": "M-M*"}, ["layer 1", "'-'"]),
        ({"layers_block_type": ["mamba", "mamba", "attention"]}, ["layer 2", "'attention'"]),
    ],
)
def test_a_hugging_face_model_of_another_kind_is_refused(changes, parts):
    refused({**HUGGING_FACE, **changes}, *parts)


@pytest.mark.parametrize(
    ("changes", "parts"),
    [
        ({"ssm_cfg": {}}, ["layer 0", "Mamba1"]),
        ({"ssm_cfg": {"layer": "Mamba1"}}, ["layer 0", "'Mamba1'"]),
        ({"ssm_cfg": None}, ["ssm_cfg"]),
        ({"attn_layer_idx": [9, 18]}, ["layer 9 is attention"]),
        ({"d_intermediate": 2048}, ["layer 0", "MLP", "2048"]),
        ({"n_layer": None}, ["n_layer", "missing"]),
        ({"rms_norm": False}, ["rms_norm"]),
        ({"ssm_cfg": {"layer": "Mamba2", "d_stat": 64}}, ["d_stat", "unknown"]),
        ({"ssm_cfg": {"layer": "Mamba2", "headdim": 100}}, ["1536", "100"]),
        ({"ssm_cfg": {"layer": "Mamba2", "d_ssm": 512}}, ["d_ssm", "512"]),
        ({"ssm_cfg": {"layer": "Mamba2", "norm_before_gate": True}}, ["norm_before_gate"]),
    ],
)
def test_an_original_model_of_another_kind_is_refused(changes, parts):
    refused({**ORIGINAL, **changes}, *parts)


def test_a_configuration_of_neither_format_is_refused():
    refused({"hidden_size": 64, "num_heads": 8}, "model_type", "d_model", "ssm_cfg")


@pytest.mark.parametrize("text", ["", "{", "[]", "\x00", '{"a": ' * 100_000])
def test_a_file_that_is_no_json_object_is_named(text, tmp_path):
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(CheckpointError, match=r"config\.json"):
        Mamba2Config.from_dir(tmp_path)


def test_a_directory_without_configuration_is_refused(tmp_path):
    with pytest.raises(CheckpointError, match=r"no config\.json"):
        Mamba2Config.from_dir(tmp_path)
