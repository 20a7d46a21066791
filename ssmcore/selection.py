"""From settings to the four strategy objects: validate options, create, ask about the others."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from inspect import get_annotations
from typing import Any

from ssmcore.device import resolve_device
from ssmcore.errors import (
    CombinationError,
    PluginError,
    SettingsError,
    SsmcoreError,
    UnavailableError,
    UnknownOptionError,
)
from ssmcore.naming import nearest
from ssmcore.registry import Registered, Registry
from ssmcore.settings import Settings
from ssmcore.strategies import (
    SLOTS,
    BatchClassifier,
    CacheMode,
    CreateContext,
    DecodeAlgorithm,
    GraphPadding,
    Limits,
    MixerShape,
    Selection,
    Slot,
    StrategyOptions,
)

STATIC_DECODE = "baseline"
"""What plans are made with when no decode algorithm is named; running takes the best there is."""

DEFAULT_CHUNK_SIZE = 256

_PROTOCOLS: dict[Slot, type] = {
    "classifier": BatchClassifier,
    "cache": CacheMode,
    "decode": DecodeAlgorithm,
    "graph": GraphPadding,
}


def _members(protocol: type) -> tuple[str, ...]:
    """Names of the methods and attributes that a protocol asks for."""
    names: dict[str, None] = {}
    for base in protocol.__mro__:
        if base.__module__ == protocol.__module__:
            names |= dict.fromkeys([*get_annotations(base), *vars(base)])
    return tuple(sorted(name for name in names if not name.startswith("_")))


_MEMBERS = {slot: _members(protocol) for slot, protocol in _PROTOCOLS.items()}


def select(
    settings: Settings,
    registry: Registry,
    *,
    running: bool = False,
    device: str | None = None,
    mixer: MixerShape | None = None,
    chunk_size: int | None = None,
) -> Selection:
    """Create the strategies that `settings` name.

    Args:
        running: False plans only: nothing is asked about this machine.
        device: where to run, "cpu", "cuda" or "cuda:N"; None takes `engine.device`.
        mixer: the model's mixer sizes, when running.
        chunk_size: the model's chunk size; `model.chunk_size` or 256 if None.

    Raises:
        UnknownStrategyError, UnknownOptionError, SettingsError: a name or an option.
        UnavailableError: a strategy cannot run on this machine.
        CombinationError: two settings cannot live together.
        PluginError: a plugin fails to create its strategy, or creates something else.
    """
    if not running:
        device = None
    elif device is None:
        device = resolve_device(settings.engine.device)
    engine = settings.engine
    limits = Limits(
        max_num_seqs=engine.max_num_seqs,
        max_model_len=engine.max_model_len,
        max_num_batched_tokens=engine.max_num_batched_tokens,
        num_spec_tokens=engine.num_spec_tokens,
        chunk_size=chunk_size or settings.model.chunk_size or DEFAULT_CHUNK_SIZE,
    )
    chosen: dict[Slot, Registered] = {}
    for slot in SLOTS:
        name = getattr(settings, slot).name
        if name is not None:
            chosen[slot] = registry.get(slot, name)
            if device is not None:
                _refuse_unavailable(slot, chosen[slot], device)
    if device is not None and "decode" not in chosen:
        return _best(settings, registry, chosen, limits, device, mixer)
    if "decode" not in chosen:
        chosen["decode"] = registry.get("decode", STATIC_DECODE)
    return _build(settings, registry, chosen, limits, device, mixer)


def _best(
    settings: Settings,
    registry: Registry,
    chosen: Mapping[Slot, Registered],
    limits: Limits,
    device: str,
    mixer: MixerShape | None,
) -> Selection:
    """The most preferred decode algorithm that runs here and that everyone accepts."""
    refusals: list[SsmcoreError] = []
    passed_over: list[str] = []
    ranked = sorted(registry.records("decode"), key=lambda entry: -entry.record.preference)
    for entry in ranked:
        name = entry.record.name
        reason = entry.unavailable(device)
        if reason is None:
            try:
                selection = _build(
                    settings, registry, {**chosen, "decode": entry}, limits, device, mixer
                )
            except SsmcoreError as error:
                refusals.append(error)
                reason = str(error)
            else:
                note = f"decode.name is not set: {name} is the best that runs here"
                return replace(selection, notes=(note, *passed_over, *selection.notes))
        passed_over.append(f"not {name}: {reason}")
    if refusals and len({str(error) for error in refusals}) == 1:
        raise refusals[0]  # no decode algorithm is at fault
    kinds = {type(error) for error in refusals}
    kind = kinds.pop() if len(kinds) == 1 else SettingsError if refusals else UnavailableError
    raise kind(
        "decode.name is not set and no decode algorithm can run here:\n" + "\n".join(passed_over)
    )


def _build(
    settings: Settings,
    registry: Registry,
    chosen: Mapping[Slot, Registered],
    limits: Limits,
    device: str | None,
    mixer: MixerShape | None,
) -> Selection:
    context = CreateContext(limits)
    objects: dict[str, Any] = {}
    notes: list[str] = []
    planned = settings.model.chunk_size
    if planned is not None and planned != limits.chunk_size:
        notes.append(
            f"model.chunk_size = {planned} ({settings.source_of('model.chunk_size')}) is for"
            f" planning; the model's {limits.chunk_size} is taken"
        )
    for slot in SLOTS:
        options, left_out = validated_options(settings, registry, slot, chosen[slot])
        objects[slot] = _create(slot, chosen[slot], options, context)
        notes += left_out
    if device is not None:
        notes += [note for one in objects.values() for note in getattr(one, "start_up_notes", ())]
    selection = Selection(
        **objects,
        names={slot: chosen[slot].record.name for slot in SLOTS},
        limits=limits,
        running=device is not None,
        device=device,
        mixer=mixer if device is not None else None,
        notes=tuple(notes),
    )
    for slot in SLOTS:
        try:
            conflict = objects[slot].check(selection)
        except Exception as error:  # a stranger's strategy may raise anything
            raise PluginError(
                f"{slot}.name = {chosen[slot].record.name!r} of {chosen[slot].origin}: check:"
                f" {type(error).__name__}: {error}"
            ) from error
        if conflict is not None:
            raise CombinationError(
                f"{conflict.setting} cannot go with {conflict.other}: {conflict.reason};"
                f" what works: {conflict.instead}"
            )
    return selection


def _create(
    slot: Slot, entry: Registered, options: StrategyOptions, context: CreateContext
) -> object:
    """One strategy object that answers all that its protocol asks."""
    where = f"{slot}.name = {entry.record.name!r} of {entry.origin}"
    try:
        strategy = entry.record.create(options, context)
    except SsmcoreError:
        raise
    except Exception as error:  # a stranger's strategy may raise anything
        raise PluginError(f"{where} cannot be created: {type(error).__name__}: {error}") from error
    missing = [name for name in _MEMBERS[slot] if not hasattr(strategy, name)]
    if missing:
        raise PluginError(
            f"{where}: {strategy!r:.80} lacks {', '.join(missing)};"
            f" it must implement ssmcore.strategies.{_PROTOCOLS[slot].__name__}"
        )
    return strategy


def validated_options(
    settings: Settings, registry: Registry, slot: Slot, entry: Registered
) -> tuple[StrategyOptions, list[str]]:
    """The strategy's options, and a line for each that a replaced strategy left behind.

    An option that the strategy does not know is an error if it comes from the same source as the
    name or a higher one; from a lower one it belonged to the strategy that was replaced.

    Raises:
        UnknownOptionError, SettingsError: an option is unknown or has a wrong value.
    """
    model = entry.record.options
    name_source = settings.source_of(f"{slot}.name")
    left_out = []
    for key in getattr(settings, slot).options:
        if key in model.model_fields:
            continue
        dotted = f"{slot}.{key}"
        source = settings.source_of(dotted)
        if settings.rank_of(dotted) >= settings.rank_of(f"{slot}.name"):
            others = [
                other.record.name
                for other in registry.records(slot)
                if key in other.record.options.model_fields
            ]
            if others:
                hint = f"; {', '.join(others)} would take it"
            else:
                hint = nearest(key, _keys(slot, model))
            raise UnknownOptionError(
                f"{source}: {dotted} is no option of {slot}.name = {entry.record.name!r}"
                f" ({name_source}){hint}"
            )
        left_out.append(
            f"{dotted} ({source}) is left out: {entry.record.name!r} ({name_source}) has no such"
            " option"
        )
    return settings.options_of(slot, model), left_out


def _keys(slot: Slot, model: type[StrategyOptions]) -> list[str]:
    """All keys of a slot's section."""
    return [*type(Settings.model_fields[slot].default).model_fields, *model.model_fields]


def _refuse_unavailable(slot: Slot, entry: Registered, device: str) -> None:
    reason = entry.unavailable(device)
    if reason is not None:
        raise UnavailableError(
            f"{slot}.name = {entry.record.name!r} cannot run on {device} here: {reason}"
        )
