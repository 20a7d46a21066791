"""What a Mamba-2 language model's `config.json` says, in one form for both published formats.

Reads the Hugging Face format (`model_type` "mamba2") and the original state-spaces format (no
`model_type`, `ssm_cfg.layer` "Mamba2"). Anything else is refused: a key that gives a size is never
guessed. Weights and tokenizers are other modules' business.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from ssmcore.errors import CheckpointError

CONFIG_FILE = "config.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Mamba2Config:
    """Sizes and switches of a pure Mamba-2 language model.

    Attributes:
        vocab_size: rows of the embedding, padding rows included.
        d_model: width of the residual stream.
        num_layers: mixer layers.
        heads, headdim, dstate, groups, d_conv: of every mixer.
        chunk_size: tokens of a chunk in training; a hint, results do not depend on it.
        norm_eps: epsilon of every norm.
        proj_bias: biases of in_proj and out_proj; conv_bias: bias of the convolution.
        residual_in_fp32: the residual stream is kept in float32.
        time_step_limit: bounds of dt after softplus.
        tied_head: the head is the embedding.
        eos_token_ids: tokens that end a text, as far as this file names any.
    """

    vocab_size: int
    d_model: int
    num_layers: int
    heads: int
    headdim: int
    dstate: int
    groups: int
    d_conv: int = 4
    chunk_size: int = 256
    norm_eps: float = 1e-5
    proj_bias: bool = False
    conv_bias: bool = True
    residual_in_fp32: bool = True
    time_step_limit: tuple[float, float] = (0.0, math.inf)
    tied_head: bool = False
    eos_token_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        """Refuse sizes that no model can have.

        Raises:
            CheckpointError: names the sizes.
        """
        if self.heads % self.groups:
            _refuse(f"{self.heads} heads cannot be shared out to {self.groups} groups")
        if self.d_conv < 2:
            _refuse(f"a convolution over {self.d_conv} token keeps no state; it must be 2 or more")
        low, high = self.time_step_limit
        if not 0.0 <= low <= high:
            _refuse(f"time_step_limit ({low}, {high}) is not a range of positive numbers")
        if not self.norm_eps >= 0.0:
            _refuse(f"the norms' epsilon is {self.norm_eps}; it must not be negative")

    @property
    def d_inner(self) -> int:
        """Channels of x and z: heads * headdim."""
        return self.heads * self.headdim

    @property
    def conv_dim(self) -> int:
        """Channels that pass the convolution: x, B and C."""
        return self.d_inner + 2 * self.groups * self.dstate

    @property
    def proj_dim(self) -> int:
        """Outputs of in_proj: z, x, B, C and dt."""
        return self.d_inner + self.conv_dim + self.heads

    @classmethod
    def from_dir(cls, directory: Path) -> Mamba2Config:
        """Read `config.json` of a model directory.

        Raises:
            CheckpointError: no such file, not JSON, or not a pure Mamba-2 model; names the file.
        """
        path = directory / CONFIG_FILE
        try:
            values = read_json(path)
        except FileNotFoundError as error:
            raise CheckpointError(f"{directory} is no model directory: no {CONFIG_FILE}") from error
        try:
            return cls.from_dict(values)
        except CheckpointError as error:
            raise CheckpointError(f"{path}: {error}") from error

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Mamba2Config:
        """Tell the format of a parsed `config.json` and read it.

        Raises:
            CheckpointError: not a pure Mamba-2 model; names the keys or the first other layer.
        """
        kind = values.get("model_type")
        if kind == "mamba2":
            return _from_hugging_face(values)
        if kind is not None:
            _refuse_kind(kind, values)
        if "ssm_cfg" in values or {"d_model", "n_layer"} <= values.keys():
            return _from_original(values)
        return _refuse(
            "neither of the Hugging Face format (model_type is missing) nor of the original one"
            f" ({_listed(k for k in ('d_model', 'n_layer', 'ssm_cfg') if k not in values)} missing)"
        )


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in a file of a model directory.

    Raises:
        CheckpointError: not a JSON object; names the file. FileNotFoundError passes through.
    """
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} cannot be read as JSON: {error}") from error
    if not isinstance(values, dict):
        raise CheckpointError(f"{path} holds no JSON object")
    return values


def _from_hugging_face(values: Mapping[str, Any]) -> Mamba2Config:
    read = _Reader(values)
    sizes = read.sizes(
        "vocab_size",
        "hidden_size",
        "num_hidden_layers",
        "num_heads",
        "head_dim",
        "state_size",
        "n_groups",
        "conv_kernel",
        "expand",
    )
    _refuse_other_layers(values)
    inner = sizes["num_heads"] * sizes["head_dim"]
    if sizes["expand"] * sizes["hidden_size"] != inner:
        _refuse(
            f"expand * hidden_size is {sizes['expand'] * sizes['hidden_size']} but"
            f" num_heads * head_dim is {inner}; they must be equal"
        )
    _refuse_activation(values.get("hidden_act", "silu"))
    return Mamba2Config(
        vocab_size=sizes["vocab_size"],
        d_model=sizes["hidden_size"],
        num_layers=sizes["num_hidden_layers"],
        heads=sizes["num_heads"],
        headdim=sizes["head_dim"],
        dstate=sizes["state_size"],
        groups=sizes["n_groups"],
        d_conv=sizes["conv_kernel"],
        chunk_size=read.size("chunk_size", 256),
        norm_eps=read.number("layer_norm_epsilon", 1e-5),
        proj_bias=read.flag("use_bias", False),
        conv_bias=read.flag("use_conv_bias", True),
        residual_in_fp32=read.flag("residual_in_fp32", True),
        time_step_limit=read.limits("time_step_limit"),
        tied_head=read.flag("tie_word_embeddings", False),
        eos_token_ids=token_ids(values.get("eos_token_id"), "eos_token_id"),
    )


# those of the mixer's own arguments that change no number at inference are not read
_SSM_KEYS = frozenset(
    (
        *("layer", "d_state", "d_conv", "expand", "headdim", "d_ssm", "ngroups", "chunk_size"),
        *("D_has_hdim", "rmsnorm", "norm_before_gate", "dt_limit", "bias", "conv_bias"),
        *("conv_init", "A_init_range", "dt_min", "dt_max", "dt_init_floor", "use_mem_eff_path"),
    )
)


def _from_original(values: Mapping[str, Any]) -> Mamba2Config:
    mixer = values.get("ssm_cfg", {})
    if not isinstance(mixer, Mapping):
        _refuse("ssm_cfg is no JSON object")
    layer = mixer.get("layer", "Mamba1")
    if layer != "Mamba2":
        said = "has no key layer, which means Mamba1" if "layer" not in mixer else f"says {layer!r}"
        _refuse(f"layer 0 is not Mamba-2: ssm_cfg {said}; ssmcore runs pure Mamba-2 models")
    _refuse_other_layers(values)
    read, mix = _Reader(values), _Reader(mixer, "ssm_cfg.")
    unknown = sorted(mixer.keys() - _SSM_KEYS)
    if unknown:
        _refuse(f"unknown keys in ssm_cfg: {_listed(unknown)}")
    sizes = read.sizes("d_model", "n_layer", "vocab_size")
    if not read.flag("rms_norm", True):
        _refuse("rms_norm is false: layer norms are not supported")
    for key, only in (("D_has_hdim", False), ("rmsnorm", True), ("norm_before_gate", False)):
        if mix.flag(key, only) is not only:
            _refuse(f"ssm_cfg.{key} is {str(not only).lower()}, which is not supported")
    inner = mix.size("expand", 2) * sizes["d_model"]
    if mixer.get("d_ssm") not in (None, inner):
        _refuse(f"ssm_cfg.d_ssm is {mixer['d_ssm']}, not all {inner} channels: not supported")
    headdim = mix.size("headdim", 64)
    if inner % headdim:
        _refuse(f"expand * d_model = {inner} is not a multiple of ssm_cfg.headdim = {headdim}")
    multiple = read.size("pad_vocab_size_multiple", 8)
    return Mamba2Config(
        vocab_size=-(-sizes["vocab_size"] // multiple) * multiple,
        d_model=sizes["d_model"],
        num_layers=sizes["n_layer"],
        heads=inner // headdim,
        headdim=headdim,
        dstate=mix.size("d_state", 128),
        groups=mix.size("ngroups", 1),
        d_conv=mix.size("d_conv", 4),
        chunk_size=mix.size("chunk_size", 256),
        proj_bias=mix.flag("bias", False),
        conv_bias=mix.flag("conv_bias", True),
        residual_in_fp32=read.flag("residual_in_fp32", True),
        time_step_limit=mix.limits("dt_limit"),
        tied_head=read.flag("tie_embeddings", True),
    )


class _Reader:
    """Typed values of a parsed file; every refusal names the key."""

    def __init__(self, values: Mapping[str, Any], prefix: str = "") -> None:
        self._values = values
        self._prefix = prefix

    def sizes(self, *keys: str) -> dict[str, int]:
        """Sizes that must be there."""
        missing = [key for key in keys if self._values.get(key) is None]
        if missing:
            _refuse(f"not a whole Mamba-2 configuration: {_listed(missing)} missing")
        return {key: self._positive(key) for key in keys}

    def size(self, key: str, default: int) -> int:
        """A size that the format lets be absent."""
        return default if self._values.get(key) is None else self._positive(key)

    def flag(self, key: str, default: bool) -> bool:
        """True or false."""
        value = self._values.get(key, default)
        if not isinstance(value, bool):
            _refuse(f"{self._prefix}{key} is {value!r}; it must be true or false")
        return value

    def number(self, key: str, default: float) -> float:
        """A finite number."""
        value = self._values.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not _finite(value):
            _refuse(f"{self._prefix}{key} is {value!r}; it must be a number")
        return float(value)

    def limits(self, key: str) -> tuple[float, float]:
        """Two numbers, of which one may be infinite; (0, inf) where the key is absent."""
        value = self._values.get(key)
        if value is None:
            return (0.0, math.inf)
        if not isinstance(value, Sequence) or isinstance(value, str) or len(value) != 2:
            _refuse(f"{self._prefix}{key} is {value!r}; it must be two numbers")
        low, high = (_number_or_infinity(item) for item in value)
        if low is None or high is None:
            _refuse(f"{self._prefix}{key} is {value!r}; it must be two numbers")
        return (low, high)

    def _positive(self, key: str) -> int:
        value = self._values[key]
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            _refuse(f"{self._prefix}{key} is {value!r}; it must be a positive integer")
        return value


def token_ids(value: object, key: str) -> tuple[int, ...]:
    """Token ids written as null, one number or a list of numbers.

    Raises:
        CheckpointError: anything else; names the key.
    """
    items = value if isinstance(value, list) else [] if value is None else [value]
    for item in items:
        if isinstance(item, bool) or not isinstance(item, int) or item < 0:
            _refuse(f"{key} is {value!r}; it must be a token id or a list of them")
    return tuple(items)


def _number_or_infinity(value: object) -> float | None:
    if isinstance(value, Mapping):
        return math.inf if value.get("__float__") == "Infinity" else None
    if isinstance(value, bool) or not isinstance(value, int | float) or value != value:
        return None
    return float(value) if _finite(value) or value > 0 else None


def _finite(value: float) -> bool:
    try:
        return math.isfinite(value)
    except OverflowError:
        return False


def _refuse_kind(kind: object, values: Mapping[str, Any]) -> NoReturn:
    other = _first_other_layer(values)
    if kind == "mamba":
        other = "layer 0 is Mamba-1"
    said = f"; {other}" if other else ""
    _refuse(f"model_type is {kind!r}, not 'mamba2'{said}; ssmcore runs pure Mamba-2 models")


def _refuse_other_layers(values: Mapping[str, Any]) -> None:
    other = _first_other_layer(values)
    if other:
        _refuse(f"not a pure Mamba-2 model: {other}")


_PURE = frozenset({"mamba", "mamba2", "m", "M", "linear_attention"})
_PATTERN_KEYS = ("layers_block_type", "layer_types", "hybrid_override_pattern", "layers_type")
_INDEX_KEYS = ("attn_layer_idx", "attn_layer_indices", "hybrid_layer_ids", "full_attn_idxs")


def _first_other_layer(values: Mapping[str, Any]) -> str | None:
    """The first layer that is no mixer, in any of the ways that hybrid models write it."""
    for key in _PATTERN_KEYS:
        pattern = values.get(key)
        if isinstance(pattern, str | list):
            for index, kind in enumerate(pattern):
                if kind not in _PURE:
                    return f"layer {index} is {kind!r} by {key}"
    for key in _INDEX_KEYS:
        layers = values.get(key)
        if isinstance(layers, list) and layers:
            first = min((x for x in layers if isinstance(x, int)), default=layers[0])
            return f"layer {first} is attention by {key}"
    width = values.get("d_intermediate")
    if width:
        return f"layer 0 is followed by an MLP, d_intermediate is {width!r}"
    return None


def _refuse_activation(name: object) -> None:
    if name not in ("silu", "swish"):
        _refuse(f"hidden_act is {name!r}; only 'silu' is supported")


def _listed(keys: Any) -> str:
    return ", ".join(keys) or "nothing"


def _refuse(message: str) -> NoReturn:
    raise CheckpointError(message)
