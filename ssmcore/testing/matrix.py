"""Every combination of strategies, options, state dtype and engine sizes, as cases to run.

The axes come from the registry and the settings: strategies from their records, option values from
the bounds of each record's options. No strategy is named here, so another plugin's are cases too.
Which cases cannot be is asked of the strategies; running one is `ssmcore.testing.runs`' business.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from functools import lru_cache
from itertools import product
from typing import Any, Literal, get_args

from annotated_types import Ge, Gt, Le, Lt
from pydantic.fields import FieldInfo

from ssmcore.errors import CombinationError, SsmcoreError, UnavailableError
from ssmcore.registry import Registered, Registry
from ssmcore.settings import CacheSettings, Settings
from ssmcore.strategies import (
    SLOTS,
    CreateContext,
    Limits,
    MixerShape,
    Selection,
    Slot,
    StrategyOptions,
)

MAX_NUM_SEQS = 16
MAX_MODEL_LEN = 576
BUDGETS = (13, 100, 300)
"""Tokens of a step: far below a chunk, across chunk ends, and nearly all prompts at once."""
DRAFTS = (0, 3)
ODD = 7
"""An option value that divides no power of two."""


@dataclass(frozen=True, slots=True)
class Choice:
    """A strategy by name, with the options given to it."""

    name: str
    options: tuple[tuple[str, Any], ...] = ()

    def __str__(self) -> str:
        return self.name + "".join(f",{key}={value}" for key, value in self.options)


@dataclass(frozen=True, slots=True)
class Case:
    """One combination.

    Attributes:
        classifier, cache, decode, graph: the strategies.
        dtype: of weights and activations.
        state_dtype: of the SSM state in the pool.
        budget: `engine.max_num_batched_tokens`.
        drafts: `engine.num_spec_tokens`.
        pool: "ample", or "tight": too few slots for all requests, so that some are preempted where
            requests grow, and wait where they do not.
        prefix: "fresh", or "shared": the prompts' beginnings were run before.
    """

    classifier: Choice
    cache: Choice
    decode: Choice
    graph: Choice
    dtype: str
    state_dtype: str
    budget: int
    drafts: int
    pool: Literal["ample", "tight"] = "ample"
    prefix: Literal["fresh", "shared"] = "fresh"

    def __str__(self) -> str:
        parts = [str(getattr(self, slot)) for slot in SLOTS]
        parts += [self.dtype, self.state_dtype, f"budget={self.budget}", f"drafts={self.drafts}"]
        return "/".join([*parts, self.pool, self.prefix])

    @property
    def values(self) -> tuple[Any, ...]:
        """Its value on each axis."""
        return tuple(getattr(self, field.name) for field in fields(self))

    @property
    def strategies(self) -> Case:
        """The same combination without pool and prefix, which no strategy is asked about."""
        return Case(*self.values[:-2])

    @property
    def cost(self) -> int:
        """About how long it takes, in parts of a plain case."""
        return 2 + (self.prefix == "shared") + 2 * (self.pool == "tight") + 2 * (self.drafts > 0)

    def as_dict(self) -> dict[str, Any]:
        """JSON values, axis by axis."""
        return {
            field.name: str(value) if isinstance(value, Choice) else value
            for field, value in zip(fields(self), self.values, strict=True)
        }

    def settings(self, device: str, memory: str = "auto") -> Settings:
        """The settings of this case; freed slots are poisoned, so stale state cannot pass."""
        sections: dict[str, dict[str, Any]] = {}
        for slot in SLOTS:
            choice: Choice = getattr(self, slot)
            sections[slot] = {"name": choice.name, **dict(choice.options)}
        sections["cache"] |= {"state_dtype": self.state_dtype, "memory": memory}
        sections["model"] = {"dtype": self.dtype}
        sections["engine"] = {
            "device": device,
            "max_num_seqs": MAX_NUM_SEQS,
            "max_model_len": MAX_MODEL_LEN,
            "max_num_batched_tokens": self.budget,
            "num_spec_tokens": self.drafts,
            "poison_freed_slots": True,
        }
        return Settings.from_dict(sections, source=str(self))


def telling_values(field: FieldInfo, chunk_size: int) -> list[Any]:
    """A few values of an option: an integer's bounds and some between; else all, or the default.

    Args:
        field: of the options model.
        chunk_size: the model's; sizes in tokens behave differently on and off its multiples.
    """
    kind = field.annotation
    if kind is bool:
        return [False, True]
    if kind is not int:
        choices = list(get_args(kind))
        plain = choices and all(isinstance(choice, str | int) for choice in choices)
        return choices if plain else [] if field.is_required() else [field.get_default()]
    low = high = None
    for bound in field.metadata:
        match bound:
            case Ge():
                low = int(bound.ge)  # type: ignore[call-overload]
            case Gt():
                low = int(bound.gt) + 1  # type: ignore[call-overload]
            case Le():
                high = int(bound.le)  # type: ignore[call-overload]
            case Lt():
                high = int(bound.lt) - 1  # type: ignore[call-overload]
    between = {ODD, chunk_size, 4 * chunk_size}
    inside = {
        value
        for value in between
        if (low is None or low <= value) and (high is None or value <= high)
    }
    return sorted(inside | {bound for bound in (low, high) if bound is not None})


def option_sets(model: type[StrategyOptions], chunk_size: int) -> list[tuple[tuple[str, Any], ...]]:
    """Telling values of every option, one option off its default at a time; () without options."""
    sets: list[tuple[tuple[str, Any], ...]] = []
    for name, field in model.model_fields.items():
        sets += [((name, value),) for value in telling_values(field, chunk_size)]
    return sets or [()]


class Matrix:
    """All cases on one device, and which of them cannot be.

    Args:
        registry: the strategies.
        device: "cpu" or "cuda".
        mixer: the model's mixer sizes; chunk_size: its chunk size.
    """

    def __init__(self, registry: Registry, device: str, mixer: MixerShape, chunk_size: int) -> None:
        self.registry = registry
        self.device = device
        self.mixer = mixer
        self.chunk_size = chunk_size
        self._created = lru_cache(maxsize=None)(self._create)
        self._refusals = lru_cache(maxsize=None)(self._refusal)

    def choices(self, slot: Slot) -> list[Choice]:
        """Every strategy of a slot with its option values.

        Values that make the same strategy under the matrix's limits are one choice.
        """
        found: dict[tuple[str, str], Choice] = {}
        for entry in self.registry.records(slot):
            for options in option_sets(entry.record.options, self.chunk_size):
                choice = Choice(entry.record.name, options)
                strategy = self._created(slot, choice, self._limits(max(BUDGETS), 0))
                found.setdefault((choice.name, _looks(strategy, choice)), choice)
        return list(found.values())

    def cases(self) -> Iterator[Case]:
        """The full product; in float32, and for a decode algorithm without it in bfloat16 too."""
        yield from self._cases("float32", self.choices("decode"))
        yield from self._cases(
            "bfloat16",
            [choice for choice in self.choices("decode") if self._not_in_float32(choice)],
        )

    def _cases(self, dtype: str, decodes: Sequence[Choice]) -> Iterator[Case]:
        strategies = [decodes if slot == "decode" else self.choices(slot) for slot in SLOTS]
        state_dtypes = get_args(CacheSettings.model_fields["state_dtype"].annotation)
        sizes = (BUDGETS, DRAFTS, ("ample", "tight"), ("fresh", "shared"))
        for values in product(*strategies, (dtype,), state_dtypes, *sizes):
            yield Case(*values)

    def _not_in_float32(self, choice: Choice) -> bool:
        """Whether every float32 case of a decode algorithm is in conflict with something."""
        of_its_name = [other for other in self.choices("decode") if other.name == choice.name]
        return all(
            (refusal := self.refusal(case)) is not None and refusal.conflicts
            for case in self._cases("float32", of_its_name)
        )

    def refusal(self, case: Case) -> Refusal | None:
        """What the strategies of a case say against it, or None if it must run."""
        return self._refusals(case.strategies)

    def _refusal(self, case: Case) -> Refusal | None:
        entries = self._entries(case)
        unavailable = tuple(
            reason
            for entry in entries.values()
            if (reason := entry.unavailable(self.device)) is not None
        )
        conflicts = []
        for strategy in self._selected(case).values():
            conflict = strategy.check(self.selection(case))
            if conflict is not None:
                conflicts.append((conflict.setting, conflict.reason))
        if not unavailable and not conflicts:
            return None
        return Refusal(tuple(conflicts), unavailable)

    def selection(self, case: Case) -> Selection:
        """The strategies of a case, made without asking any of them."""
        entries = self._entries(case)
        mixer = MixerShape(
            **{
                field.name: getattr(self.mixer, field.name)
                for field in fields(MixerShape)
                if not field.name.endswith("_dtype")
            },
            activation_dtype=case.dtype,
            conv_dtype=case.dtype,
            state_dtype=case.state_dtype,
        )
        return Selection(
            **self._selected(case),
            names={slot: entry.record.name for slot, entry in entries.items()},
            limits=self._limits(case.budget, case.drafts),
            running=True,
            device=self.device,
            mixer=mixer,
        )

    def _entries(self, case: Case) -> dict[Slot, Registered]:
        return {slot: self.registry.get(slot, getattr(case, slot).name) for slot in SLOTS}

    def _selected(self, case: Case) -> dict[str, Any]:
        limits = self._limits(case.budget, case.drafts)
        return {slot: self._created(slot, getattr(case, slot), limits) for slot in SLOTS}

    def _create(self, slot: Slot, choice: Choice, limits: Limits) -> Any:
        record = self.registry.get(slot, choice.name).record
        return record.create(record.options(**dict(choice.options)), CreateContext(limits))

    def _limits(self, budget: int, drafts: int) -> Limits:
        return Limits(MAX_NUM_SEQS, MAX_MODEL_LEN, budget, drafts, self.chunk_size)


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why a case cannot run: `(setting, reason)` of each conflict, and what is missing here."""

    conflicts: tuple[tuple[str, str], ...]
    unavailable: tuple[str, ...]

    @property
    def kind(self) -> Literal["impossible", "unavailable"]:
        """Whether it cannot be anywhere, or only not on this machine."""
        return "impossible" if self.conflicts else "unavailable"

    @property
    def reason(self) -> str:
        """One sentence."""
        return self.conflicts[0][1] if self.conflicts else self.unavailable[0]

    def explains(self, error: SsmcoreError) -> bool:
        """Whether an error says what the strategies said: its class, the setting and the reason."""
        text = str(error)
        if isinstance(error, CombinationError):
            return any(setting in text and reason in text for setting, reason in self.conflicts)
        return isinstance(error, UnavailableError) and any(
            reason in text for reason in self.unavailable
        )


def _looks(strategy: object, choice: Choice) -> str:
    """A strategy's attributes, or its options where it does not show them."""
    return repr(vars(strategy)) if hasattr(strategy, "__dict__") else str(choice)


def shard_of(cases: Sequence[Case], number: int, count: int) -> list[Case]:
    """Part `number` of `count` (from 1) of cases; all parts together are all cases."""
    if not 1 <= number <= count:
        raise ValueError(f"there is no shard {number} of {count}; they count from 1")
    return list(cases[number - 1 :: count])
