"""From settings to the four strategy objects: validate options, create, ask about the others."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from pydantic import ValidationError

from ssmcore.errors import (
    CombinationError,
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
    CreateContext,
    Limits,
    MixerShape,
    Selection,
    Slot,
    StrategyOptions,
)

STATIC_DECODE = "baseline"
"""What plans are made with when no decode algorithm is named; running takes the best there is."""

DEFAULT_CHUNK_SIZE = 256


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
        device: "cpu" or "cuda", when running.
        mixer: the model's mixer sizes, when running.
        chunk_size: the model's chunk size; `model.chunk_size` or 256 if None.

    Raises:
        UnknownStrategyError, UnknownOptionError, SettingsError: a name or an option.
        UnavailableError: a strategy cannot run on this machine.
        CombinationError: two settings cannot live together.
    """
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
            if running:
                _refuse_unavailable(slot, chosen[slot], device or "cpu")
    if "decode" in chosen:
        return _build(settings, chosen, limits, running, device, mixer)
    if not running:
        chosen["decode"] = registry.get("decode", STATIC_DECODE)
        return _build(settings, chosen, limits, running, device, mixer)
    return _best(settings, registry, chosen, limits, device or "cpu", mixer)


def _best(
    settings: Settings,
    registry: Registry,
    chosen: Mapping[Slot, Registered],
    limits: Limits,
    device: str,
    mixer: MixerShape | None,
) -> Selection:
    """The most preferred decode algorithm that runs here and that everyone accepts."""
    passed_over = []
    ranked = sorted(registry.records("decode"), key=lambda entry: -entry.record.preference)
    for entry in ranked:
        name = entry.record.name
        reason = entry.record.unavailable(device)
        if reason is None:
            try:
                selection = _build(
                    settings, {**chosen, "decode": entry}, limits, True, device, mixer
                )
            except SsmcoreError as error:
                reason = str(error)
            else:
                note = f"decode.name is not set: {name} is the best that runs here"
                return replace(selection, notes=(note, *passed_over, *selection.notes))
        passed_over.append(f"not {name}: {reason}")
    raise UnavailableError(
        "decode.name is not set and no decode algorithm can run here:\n" + "\n".join(passed_over)
    )


def _build(
    settings: Settings,
    chosen: Mapping[Slot, Registered],
    limits: Limits,
    running: bool,
    device: str | None,
    mixer: MixerShape | None,
) -> Selection:
    context = CreateContext(limits)
    objects: dict[str, Any] = {}
    notes: list[str] = []
    for slot in SLOTS:
        options, left_out = validated_options(settings, slot, chosen[slot])
        objects[slot] = chosen[slot].record.create(options, context)
        notes += left_out
    selection = Selection(
        **objects,
        names={slot: chosen[slot].record.name for slot in SLOTS},
        limits=limits,
        running=running,
        device=device if running else None,
        mixer=mixer if running else None,
        notes=tuple(notes),
    )
    for slot in SLOTS:
        conflict = objects[slot].check(selection)
        if conflict is not None:
            raise CombinationError(
                f"{conflict.setting} cannot go with {conflict.other}: {conflict.reason};"
                f" what works: {conflict.instead}"
            )
    return selection


def validated_options(
    settings: Settings, slot: Slot, entry: Registered
) -> tuple[StrategyOptions, list[str]]:
    """The strategy's options, and a line for each that a replaced strategy left behind.

    An option that the strategy does not know is an error if it comes from the same source as the
    name or a higher one; from a lower one it belonged to the strategy that was replaced.

    Raises:
        UnknownOptionError, SettingsError: an option is unknown or has a wrong value.
    """
    model = entry.record.options
    given = getattr(settings, slot).options
    known = {key: value for key, value in given.items() if key in model.model_fields}
    left_out = []
    for key in given.keys() - known.keys():
        dotted = f"{slot}.{key}"
        source = settings.source_of(dotted)
        if settings.rank_of(dotted) >= settings.rank_of(f"{slot}.name"):
            raise UnknownOptionError(
                f"{source}: {dotted} is no option of {slot}.name = {entry.record.name!r}"
                f"{nearest(key, model.model_fields)}"
            )
        left_out.append(
            f"{dotted} ({source}) is left out: {entry.record.name!r}"
            f" ({settings.source_of(f'{slot}.name')}) has no such option"
        )
    try:
        return model.model_validate(known), left_out
    except ValidationError as error:
        fault = error.errors(include_url=False)[0]
        dotted = ".".join([slot, *map(str, fault["loc"])])
        raise SettingsError(
            f"{settings.source_of(dotted)}: {dotted} = {fault.get('input')!r:.80}: {fault['msg']}"
        ) from None


def _refuse_unavailable(slot: Slot, entry: Registered, device: str) -> None:
    reason = entry.record.unavailable(device)
    if reason is not None:
        raise UnavailableError(
            f"{slot}.name = {entry.record.name!r} cannot run on {device} here: {reason}"
        )
