"""Weights of a Mamba-2 language model from a directory: found, checked, converted one by one.

Files are memory-mapped and each tensor is copied out in the wanted dtype, so that what a process
needs besides the weights themselves is one tensor. Names and shapes are checked before the first
byte of a tensor is read. Of pickled files only tensors are read (`weights_only`).
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import torch
from safetensors import SafetensorError, safe_open

from ssmcore.errors import CheckpointError
from ssmcore.models.config import Mamba2Config, read_json
from ssmcore.models.projection import packed

SINGLE_FILES = ("model.safetensors", "pytorch_model.bin")
INDEX_FILES = ("model.safetensors.index.json", "pytorch_model.bin.index.json")

_EMBEDDING = "backbone.embeddings.weight"
_ORIGINAL_EMBEDDING = "backbone.embedding.weight"
_HEAD = "lm_head.weight"
_FINAL_NORM = "backbone.norm_f.weight"
_FLOATS = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
_SHOWN = 4


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One layer's tensors, in the model's dtype unless said otherwise.

    norm: (d_model,); in_proj: (proj_dim, d_model), rows in the order z, x, B, C, dt;
    conv_weight: (conv_dim, d_conv); conv_bias: (conv_dim,) or None; dt_bias, A, D: (heads,),
    float32 (float64 in a float64 model), A = -exp(A_log); gate_norm: (d_inner,);
    out_proj: (d_model, d_inner); in_proj_bias, out_proj_bias: or None. in_proj and out_proj may be
    packed (`ssmcore.models.projection`).
    """

    norm: torch.Tensor
    in_proj: torch.Tensor
    in_proj_bias: torch.Tensor | None
    conv_weight: torch.Tensor
    conv_bias: torch.Tensor | None
    dt_bias: torch.Tensor
    A: torch.Tensor
    D: torch.Tensor
    gate_norm: torch.Tensor
    out_proj: torch.Tensor
    out_proj_bias: torch.Tensor | None


@dataclass(frozen=True, slots=True)
class ModelWeights:
    """All tensors of a model: embedding, head: (vocab_size, d_model), one tensor when tied.

    A head of its own may be packed.
    """

    embedding: torch.Tensor
    layers: tuple[LayerWeights, ...]
    final_norm: torch.Tensor
    head: torch.Tensor

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors, a tied head counted once."""
        found = [self.embedding, self.final_norm]
        if self.head is not self.embedding:
            found.append(self.head)
        for layer in self.layers:
            values = (getattr(layer, field.name) for field in fields(layer))
            found += [value for value in values if value is not None]
        return sum(tensor.nbytes for tensor in found)


class _Wanted(NamedTuple):
    """A tensor of the checkpoint and its `field` of `LayerWeights`.

    wide: kept in float32; multiplied: a matrix of `project`, which may be packed.
    """

    name: str
    field: str
    shape: tuple[int, ...]
    wide: bool = False
    multiplied: bool = False


def layer_tensors(config: Mamba2Config) -> tuple[_Wanted, ...]:
    """What every layer has, by its name below `backbone.layers.N.`."""
    heads, inner = (config.heads,), (config.d_inner,)
    wanted = [
        _Wanted("norm.weight", "norm", (config.d_model,)),
        _Wanted(
            "mixer.in_proj.weight", "in_proj", (config.proj_dim, config.d_model), multiplied=True
        ),
        _Wanted("mixer.conv1d.weight", "conv_weight", (config.conv_dim, 1, config.d_conv)),
        _Wanted("mixer.dt_bias", "dt_bias", heads, wide=True),
        _Wanted("mixer.A_log", "A", heads, wide=True),
        _Wanted("mixer.D", "D", heads, wide=True),
        _Wanted("mixer.norm.weight", "gate_norm", inner),
        _Wanted(
            "mixer.out_proj.weight", "out_proj", (config.d_model, config.d_inner), multiplied=True
        ),
    ]
    if config.conv_bias:
        wanted.append(_Wanted("mixer.conv1d.bias", "conv_bias", (config.conv_dim,)))
    if config.proj_bias:
        wanted.append(_Wanted("mixer.in_proj.bias", "in_proj_bias", (config.proj_dim,)))
        wanted.append(_Wanted("mixer.out_proj.bias", "out_proj_bias", (config.d_model,)))
    return tuple(wanted)


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of what is never narrowed: float32, or float64 in a float64 model."""
    return torch.promote_types(dtype, torch.float32)


def build_weights(
    config: Mamba2Config,
    dtype: torch.dtype,
    tensor: Callable[[str, tuple[int, ...], torch.dtype, bool], torch.Tensor],
) -> ModelWeights:
    """Put weights together from `tensor(name, shape, dtype, multiplied)`, asked for one by one."""
    vocabulary = (config.vocab_size, config.d_model)
    # the head first: while it is packed it takes twice its memory
    head = None if config.tied_head else tensor(_HEAD, vocabulary, dtype, True)
    embedding = tensor(_EMBEDDING, vocabulary, dtype, False)
    layers = []
    for index in range(config.num_layers):
        found: dict[str, torch.Tensor | None] = dict.fromkeys(
            ("in_proj_bias", "conv_bias", "out_proj_bias")
        )
        for want in layer_tensors(config):
            name = f"backbone.layers.{index}.{want.name}"
            kept = wide_dtype(dtype) if want.wide else dtype
            value = tensor(name, want.shape, kept, want.multiplied)
            if want.field == "A":
                value = -torch.exp(value)
            elif want.field == "conv_weight":
                value = value.squeeze(1)
            found[want.field] = value
        layers.append(LayerWeights(**found))  # type: ignore[arg-type]
    final_norm = tensor(_FINAL_NORM, (config.d_model,), dtype, False)
    return ModelWeights(embedding, tuple(layers), final_norm, embedding if head is None else head)


def load_weights(
    directory: Path, config: Mamba2Config, dtype: torch.dtype | None, device: torch.device
) -> ModelWeights:
    """Read a checkpoint.

    Args:
        directory: holds `model.safetensors` or its shards and index, or `pytorch_model.bin`.
        config: what the tensors must match.
        dtype: what they are converted to; None: the embedding's own.
        device: where they go.

    Raises:
        CheckpointError: no weights, a file that cannot be read, a tensor that is missing, unknown,
            of another shape or no floating-point tensor; names the file or the tensor.
    """
    with _open(directory) as source:
        _check_names(source, config)

        def take(
            name: str, shape: tuple[int, ...], wanted: torch.dtype, multiplied: bool
        ) -> torch.Tensor:
            mapped = source.read(name, shape)
            if not multiplied or device.type != "cpu":
                return mapped.to(device=device, dtype=wanted, copy=True)
            converted = mapped.to(wanted)
            result = packed(converted)
            return mapped.to(wanted, copy=True) if result is mapped else result

        if dtype is None:
            dtype = source.read(_EMBEDDING, (config.vocab_size, config.d_model)).dtype
        with torch.no_grad():
            return build_weights(config, dtype, take)


class _Source:
    """Tensors of one checkpoint by their Hugging Face names, whatever the files call them."""

    def __init__(self, readers: Mapping[str, tuple[Path, Callable[[], torch.Tensor]]]) -> None:
        if _ORIGINAL_EMBEDDING in readers and _EMBEDDING not in readers:
            readers = {
                _EMBEDDING if name == _ORIGINAL_EMBEDDING else name: reader
                for name, reader in readers.items()
            }
        self.readers = readers

    def read(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        """The mapped tensor, once it has been found to be what it must be."""
        path, reader = self.readers[name]
        try:
            tensor = reader()
        except (SafetensorError, RuntimeError, OSError, ValueError) as error:
            raise CheckpointError(f"{path}: tensor {name} cannot be read: {error}") from error
        found = tuple(tensor.shape)
        if found != shape:
            raise CheckpointError(f"{path}: tensor {name} has shape {found}, wanted {shape}")
        if tensor.dtype not in _FLOATS:
            raise CheckpointError(
                f"{path}: tensor {name} holds {str(tensor.dtype).removeprefix('torch.')}, wanted"
                " float32, float16, bfloat16 or float64; quantised checkpoints are not supported"
            )
        return tensor


def _check_names(source: _Source, config: Mamba2Config) -> None:
    """Refuse missing and unknown tensors, and a tied head that is not the embedding."""
    wanted = {_EMBEDDING, _FINAL_NORM} | {
        f"backbone.layers.{index}.{want.name}"
        for index in range(config.num_layers)
        for want in layer_tensors(config)
    }
    if not config.tied_head:
        wanted.add(_HEAD)
    found = source.readers.keys()
    missing = sorted(wanted - found, key=_natural)
    unknown = sorted(found - wanted - {_HEAD}, key=_natural)
    if unknown:
        path = source.readers[unknown[0]][0]
        raise CheckpointError(
            f"{path}: {_some(unknown)} not part of a Mamba-2 model of {config.num_layers} layers"
            + (f"; {_some(missing)} missing" if missing else "")
        )
    if missing:
        where = next(iter(source.readers.values()), (Path("the checkpoint"), None))[0].parent
        raise CheckpointError(f"{where}: {_some(missing)} missing")
    shape = (config.vocab_size, config.d_model)
    if (
        config.tied_head
        and _HEAD in found
        and not torch.equal(source.read(_HEAD, shape), source.read(_EMBEDDING, shape))
    ):
        path = source.readers[_HEAD][0]
        raise CheckpointError(
            f"{path}: the configuration ties the head to the embedding, but {_HEAD} differs from"
            f" {_EMBEDDING}; say tie_word_embeddings (tie_embeddings) false to use it"
        )


def _natural(name: str) -> list[tuple[int, int, str]]:
    """Sort key: numbers between dots by value."""
    return [(0, int(p), "") if p.isdecimal() else (1, 0, p) for p in name.split(".")]


def _some(names: list[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    word = "tensor" if len(names) == 1 else "tensors"
    return f"{word} {', '.join(names[:_SHOWN])}{more}"


@contextmanager
def _open(directory: Path) -> Iterator[_Source]:
    """Map the checkpoint's files: an index's before a single file, safetensors before pickle."""
    for single, index in zip(SINGLE_FILES, INDEX_FILES, strict=True):
        with ExitStack() as stack:
            if (directory / index).is_file():
                names = _indexed(directory, directory / index)
                maps = {path: _map(path, stack) for path in sorted(set(names.values()))}
                for name, path in names.items():
                    if name not in maps[path]:
                        _refuse(f"{directory / index}: tensor {name} is not in {path.name}")
                stray = [n for path, m in maps.items() for n in m if names.get(n) != path]
                if stray:
                    _refuse(f"{directory / index}: {_some(sorted(stray))} not in the index")
            elif (directory / single).is_file():
                maps = {directory / single: _map(directory / single, stack)}
            else:
                continue
            yield _Source({n: (path, read) for path, m in maps.items() for n, read in m.items()})
            return
    wanted = ", ".join((SINGLE_FILES[0], INDEX_FILES[0], SINGLE_FILES[1]))
    _refuse(f"{directory} holds no weights: none of {wanted}")


def _indexed(directory: Path, index: Path) -> dict[str, Path]:
    """Tensor name to file, as a shard index says; files are beside the index, nowhere else."""
    names = read_json(index).get("weight_map")
    if not isinstance(names, dict) or not names:
        _refuse(f"{index} has no weight_map")
    paths = {}
    for name, file in names.items():
        if not isinstance(file, str) or Path(file).name != file or file in ("", ".", ".."):
            _refuse(f"{index}: tensor {name} is in {file!r}, which is no file name")
        paths[name] = directory / file
        if not paths[name].is_file():
            _refuse(f"{index}: tensor {name} is in {file!r}, but there is no such file")
    return paths


def _map(path: Path, stack: ExitStack) -> dict[str, Callable[[], torch.Tensor]]:
    """Name to a function that gives the mapped tensor."""
    if path.suffix == ".bin":
        return _map_pickled(path)
    try:
        file: Any = stack.enter_context(safe_open(path, framework="pt"))
        return {name: _getter(file, name) for name in file.keys()}  # noqa: SIM118
    except (SafetensorError, OSError, ValueError) as error:
        raise CheckpointError(f"{path} is damaged or cut short: {error}") from error


def _getter(file: Any, name: str) -> Callable[[], torch.Tensor]:
    def get() -> torch.Tensor:
        tensor: torch.Tensor = file.get_tensor(name)
        return tensor

    return get


def _map_pickled(path: Path) -> dict[str, Callable[[], torch.Tensor]]:
    try:
        tensors = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except (RuntimeError, OSError, ValueError, EOFError, KeyError, pickle.UnpicklingError) as error:
        first = str(error).split("\n", 1)[0]
        raise CheckpointError(f"{path} is damaged or holds more than tensors: {first}") from error
    if not isinstance(tensors, dict) or not all(map(torch.is_tensor, tensors.values())):
        _refuse(f"{path} is no mapping of names to tensors")
    return {str(name): tensor.detach for name, tensor in tensors.items()}


def _refuse(message: str) -> NoReturn:
    raise CheckpointError(message)
