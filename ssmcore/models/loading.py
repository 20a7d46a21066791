"""From `model.path` to a model and its tokenizer; and models of random weights.

The one place where files, configuration, weights and tokenizer come together.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import NamedTuple

import torch

from ssmcore.errors import SettingsError
from ssmcore.models.config import Mamba2Config
from ssmcore.models.hub import resolve
from ssmcore.models.mamba2 import Mamba2Model
from ssmcore.models.projection import packed
from ssmcore.models.tokenizer import Tokenizer, load_tokenizer
from ssmcore.models.weights import build_weights, load_weights

_DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float64": torch.float64,
}


class LoadedModel(NamedTuple):
    """A model and its tokenizer."""

    model: Mamba2Model
    tokenizer: Tokenizer


def load_model(
    path: str | Path,
    *,
    device: torch.device | str = "cpu",
    dtype: torch.dtype | str = "auto",
    revision: str | None = None,
) -> LoadedModel:
    """Load a Mamba-2 language model.

    Args:
        path: "quickstart", a directory, or a hub id.
        device: where the weights go.
        dtype: of weights and activations; "auto" is float32 on a CPU, the checkpoint's on a GPU.
        revision: branch, tag or commit of a hub id.

    Raises:
        CheckpointError: not a model, not a pure Mamba-2 model, or damaged.
        SettingsError: an unknown dtype, or a revision of a directory.
        UnavailableError: the hub is needed and cannot be used.
    """
    device = torch.device(device)
    wanted = resolve_dtype(dtype, device)
    directory = resolve(path, revision)
    config = Mamba2Config.from_dir(directory)
    tokenizer = load_tokenizer(directory, config.vocab_size)
    return LoadedModel(
        Mamba2Model(config, load_weights(directory, config, wanted, device)), tokenizer
    )


def random_model(
    config: Mamba2Config,
    *,
    device: torch.device | str = "cpu",
    dtype: torch.dtype | str = torch.float32,
    seed: int = 0,
) -> Mamba2Model:
    """A model of random weights, for tests and benchmarks: same seed, same weights.

    Scales are those of a new model, so that activations stay of order one and states decay at
    different rates.
    """
    device = torch.device(device)
    wanted = resolve_dtype(dtype, device) or torch.float32
    generator = torch.Generator().manual_seed(seed)

    def draw(
        name: str, shape: tuple[int, ...], dtype: torch.dtype, multiplied: bool
    ) -> torch.Tensor:
        tensor = _draw(name, shape, generator).to(device=device, dtype=dtype)
        return packed(tensor) if multiplied else tensor

    return Mamba2Model(config, build_weights(config, wanted, draw))


def resolve_dtype(dtype: torch.dtype | str, device: torch.device) -> torch.dtype | None:
    """The dtype that a setting means; None: the checkpoint's.

    Raises:
        SettingsError: an unknown name.
    """
    if isinstance(dtype, str):
        if dtype == "auto":
            return torch.float32 if device.type == "cpu" else None
        if dtype not in _DTYPES:
            raise SettingsError(f"model.dtype = {dtype!r} is not one of auto, {', '.join(_DTYPES)}")
        return _DTYPES[dtype]
    return dtype


def _draw(name: str, shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    """One tensor in float32, by its name in the checkpoint."""
    if name.endswith("A_log"):
        return torch.empty(shape).uniform_(1.0, 16.0, generator=generator).log()
    if name.endswith("dt_bias"):
        low, high = math.log(1e-3), math.log(1e-1)
        dt = torch.empty(shape).uniform_(low, high, generator=generator).exp()
        return dt + torch.log(-torch.expm1(-dt))
    if name.endswith(("norm.weight", "norm_f.weight", ".D")):
        return torch.empty(shape).uniform_(0.5, 1.5, generator=generator)
    if "embedding" in name:
        return torch.randn(shape, generator=generator)
    if name.endswith("bias"):
        return torch.empty(shape).uniform_(-0.1, 0.1, generator=generator)
    bound = shape[-1] ** -0.5
    return torch.empty(shape).uniform_(-bound, bound, generator=generator)
