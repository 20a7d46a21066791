"""Settings: what a person may configure, its types and bounds, and where each value came from.

Reading sources is `ssmcore.settings_sources`' business; choosing strategies is
`ssmcore.selection`'s. A strategy's options are kept here as they were given; the plugin's own model
validates them when the strategy is chosen.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, PrivateAttr, ValidationError, field_validator

from ssmcore.errors import SettingsError, UnknownOptionError
from ssmcore.naming import nearest
from ssmcore.settings_sources import Source, default_sources, merge
from ssmcore.strategies import SLOTS, Slot

_ModelT = TypeVar("_ModelT", bound=BaseModel)

Count = Annotated[int, Field(ge=1, le=2**31 - 1)]


class _Section(BaseModel):
    model_config = ConfigDict(
        strict=True, extra="forbid", frozen=True, use_attribute_docstrings=True
    )


class ModelSettings(_Section):
    """Which model to run."""

    path: str = "quickstart"
    """A directory, a hub id, or `quickstart` for the bundled model."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Of weights and activations; auto is float32 on a CPU, the checkpoint's on a GPU."""
    revision: str | None = None
    """Branch, tag or commit of a hub id."""
    chunk_size: Count | None = None
    """Tokens of a prefill chunk, for planning alone; running takes the model's."""


class EngineSettings(_Section):
    """Sizes of the engine."""

    max_num_seqs: Count = 64
    """Requests that run at once: rows of a step."""
    max_model_len: Count = 8192
    """Tokens of a request, prompt and generated together."""
    max_num_batched_tokens: Count = 4096
    """Tokens scheduled in one step."""
    num_spec_tokens: Annotated[int, Field(ge=0, le=64)] = 0
    """Draft tokens a row that are verified in one step."""
    device: Annotated[str, Field(pattern=r"^(auto|cpu|cuda(:[0-9]{1,3})?)$")] = "auto"
    """`auto`, `cpu`, `cuda` or `cuda:N`."""
    seed: Annotated[int, Field(ge=0, le=2**63 - 1)] = 0
    """Where requests without a seed of their own get theirs from."""
    poison_freed_slots: bool = False
    """Fill freed slots with NaN: a test mode that shows reads of stale state."""


class _SlotSection(BaseModel):
    model_config = ConfigDict(
        strict=True, extra="allow", frozen=True, use_attribute_docstrings=True
    )

    @property
    def options(self) -> dict[str, Any]:
        """The chosen strategy's options, as given."""
        return dict(self.model_extra or {})


class ClassifierSettings(_SlotSection):
    """The batch classifier and its options."""

    name: str = "decode-first"


class CacheSettings(_SlotSection):
    """The cache mode, its options, and what it keeps states in."""

    name: str = "none"
    state_dtype: Literal["float32", "float16", "bfloat16"] = "float32"
    """Of the SSM state in the pool."""
    memory: str = "auto"
    """Of the state pool: `auto`, a size such as `4 GiB`, or a fraction of free memory."""

    @property
    def memory_amount(self) -> Memory:
        """`memory`, read."""
        return parse_memory(self.memory)

    @field_validator("memory", mode="before")
    @classmethod
    def _a_bare_number_is_a_fraction(cls, value: object) -> object:
        return str(value) if isinstance(value, float) else value

    @field_validator("memory")
    @classmethod
    def _memory_is_an_amount(cls, value: str) -> str:
        parse_memory(value)
        return value


class DecodeSettings(_SlotSection):
    """The decode algorithm and its options; without a name the best that runs here is taken."""

    name: str | None = None


class GraphSettings(_SlotSection):
    """The graph padding and its options."""

    name: str = "none"


@dataclass(frozen=True, slots=True)
class Memory:
    """An amount of memory: `nbytes`, or `fraction` of what is free, or neither for auto."""

    nbytes: int | None = None
    fraction: float | None = None


_UNITS = {"B": 1, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}
_UNITS |= {"KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}


def parse_memory(text: str) -> Memory:
    """Read `auto`, a size with a unit, or a fraction above 0 and at most 1.

    Raises:
        ValueError: anything else.
    """
    if text == "auto":
        return Memory()
    number = text.strip().rstrip("BbIiKkMmGgTt ").strip()
    unit = text.strip()[len(number) :].strip().upper()
    try:
        amount = float(number)
    except ValueError:
        amount = float("nan")
    if not unit and 0.0 < amount <= 1.0:
        return Memory(fraction=amount)
    if unit in _UNITS and 1.0 <= amount * _UNITS[unit] < 2**60:
        return Memory(nbytes=int(amount * _UNITS[unit]))
    raise ValueError(
        f"{text!r} is no amount of memory; write 'auto', a size such as '4 GiB', or a fraction of"
        " free memory such as '0.8'"
    )


class Settings(BaseModel):
    """Everything that can be configured."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)

    model: ModelSettings = ModelSettings()
    engine: EngineSettings = EngineSettings()
    classifier: ClassifierSettings = ClassifierSettings()
    cache: CacheSettings = CacheSettings()
    decode: DecodeSettings = DecodeSettings()
    graph: GraphSettings = GraphSettings()

    _sources: dict[str, tuple[int, str]] = PrivateAttr(default_factory=dict)
    _texts: dict[str, str] = PrivateAttr(default_factory=dict)

    @classmethod
    def load(
        cls,
        config: Path | None = None,
        overrides: Sequence[str] = (),
        environ: Mapping[str, str] | None = None,
    ) -> Settings:
        """Read the file, the environment and `KEY=VALUE` overrides, in rising precedence.

        Args:
            config: a TOML file; None takes `ssmcore.toml` in the working directory if it is there.
            overrides: such as `decode.buffer_len=8`; values are TOML, bare words are text.
            environ: instead of the process's environment.

        Raises:
            SettingsError: a source cannot be read, a key is unknown, a value has the wrong type.
        """
        return cls.from_sources(default_sources(config, overrides, environ))

    @classmethod
    def from_dict(cls, values: Mapping[str, Any], source: str = "settings") -> Settings:
        """Settings from one mapping of sections.

        Raises:
            SettingsError: as for `load`.
        """
        if not isinstance(values, Mapping):
            raise SettingsError(f"{source}: settings must be sections, got {type(values).__name__}")
        return cls.from_sources([Source(source, dict(values))])

    @classmethod
    def from_sources(cls, sources: Sequence[Source]) -> Settings:
        """Settings from any sources, lowest precedence first.

        Raises:
            SettingsError: as for `load`.
        """
        merged = merge(sources)
        try:
            settings = _validate(cls, merged.values, merged.texts)
        except ValidationError as error:
            raise _readable(error, merged.origins) from None
        settings._sources.update(merged.origins)
        settings._texts.update(merged.texts)
        return settings

    def options_of(self, slot: Slot, model: type[_ModelT]) -> _ModelT:
        """The options of a slot that `model` knows, validated by it.

        Raises:
            SettingsError: a value is wrong, or one that is required is missing.
        """
        given = getattr(self, slot).options
        known = {key: value for key, value in given.items() if key in model.model_fields}
        try:
            return _validate(model, {slot: known}, self._texts, slot)
        except ValidationError as error:
            raise _readable(error, self._sources, slot) from None

    def source_of(self, key: str) -> str:
        """Where a value came from: `default`, a file's name, the variable, or `--set`."""
        return self._sources.get(key, (0, "default"))[1]

    def rank_of(self, key: str) -> int:
        """Precedence of a value's source; 0 for a default."""
        return self._sources.get(key, (0, "default"))[0]

    def effective(self) -> dict[str, Any]:
        """Dotted key to value, options included."""
        return {
            f"{section}.{key}": value
            for section, values in self.model_dump().items()
            for key, value in values.items()
        }


DEFAULT_NAMES: dict[Slot, str | None] = {
    slot: Settings.model_fields[slot].default.name for slot in SLOTS
}
"""Strategy of a slot whose name is not set; None chooses when something is to run."""

_TEXT_WANTED = ("string_type", "literal_error", "enum")


def _validate(
    model: type[_ModelT], sections: dict[str, Any], texts: Mapping[str, str], section: str = ""
) -> _ModelT:
    """Validate all sections, or one; where text is wanted, take what was read as another value.

    A bare `123` on the command line is a number, but a directory may have that name.
    """
    part = (section,) if section else ()
    try:
        return model.model_validate(sections[section] if section else sections)
    except ValidationError as error:
        reread = False
        for fault in error.errors(include_url=False, include_context=False):
            path = (*part, *fault["loc"])[:2]
            text = texts.get(".".join(map(str, path)))
            if text is not None and fault["type"] in _TEXT_WANTED:
                where, key = path
                reread |= sections[str(where)][key] != text
                sections[str(where)][key] = text
        if not reread:
            raise
    return model.model_validate(sections[section] if section else sections)


def _readable(
    error: ValidationError, origins: Mapping[str, tuple[int, str]], section: str = ""
) -> SettingsError:
    """The first fault, with key, value, source and the nearest key."""
    fault = error.errors(include_url=False)[0]
    path = [section] * bool(section) + [str(part) for part in fault["loc"]]
    key = ".".join(path)
    source = origins.get(".".join(path[:2]), (0, "settings"))[1]
    if fault["type"] == "missing":
        return SettingsError(f"{key} must be set: {section}.name needs it and it has no default")
    if fault["type"] == "extra_forbidden" and not section:
        owner: Any = Settings.model_fields[path[0]].annotation
        return UnknownOptionError(
            f"{source}: there is no setting {key!r}{nearest(path[-1], owner.model_fields)}"
        )
    wanted = fault["msg"].replace("Input should be", "must be", 1).removeprefix("Value error, ")
    return SettingsError(f"{source}: {key} = {fault.get('input')!r:.80}: {wanted}")
