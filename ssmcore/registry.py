"""Registries: the plugin manager run once at start-up, and the records it collected.

Plugins come from entry points of the group `ssmcore`, the bundled ones included. One that cannot be
imported is kept aside with its error, and matters only when something it may have offered is asked
for.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from importlib.metadata import EntryPoint, entry_points
from types import ModuleType
from typing import Any

import pluggy

from ssmcore import hookspecs
from ssmcore.errors import DuplicateStrategyError, PluginError, UnknownStrategyError
from ssmcore.naming import nearest
from ssmcore.observers import Observer
from ssmcore.strategies import (
    SLOTS,
    BatchClassifierRecord,
    CacheModeRecord,
    DecodeAlgorithmRecord,
    GraphPaddingRecord,
    Slot,
    StrategyRecord,
)

ENTRY_POINT_GROUP = "ssmcore"

_HOOKS: dict[Slot, tuple[str, type[StrategyRecord[Any]]]] = {
    "classifier": ("ssmcore_batch_classifiers", BatchClassifierRecord),
    "cache": ("ssmcore_cache_modes", CacheModeRecord),
    "decode": ("ssmcore_decode_algorithms", DecodeAlgorithmRecord),
    "graph": ("ssmcore_graph_paddings", GraphPaddingRecord),
}


@dataclass(frozen=True, slots=True)
class Registered:
    """A record and the distribution that offers it."""

    record: StrategyRecord[Any]
    distribution: str
    version: str


@dataclass(frozen=True, slots=True)
class BrokenPlugin:
    """A plugin that could not be loaded, and why."""

    name: str
    distribution: str
    error: str


class Registry:
    """All strategies that installed plugins offer, by slot and name."""

    def __init__(self) -> None:
        self._manager = pluggy.PluginManager(hookspecs.PROJECT)
        self._manager.add_hookspecs(hookspecs)
        self._records: dict[Slot, dict[str, Registered]] = {slot: {} for slot in SLOTS}
        self._observers: list[Observer] = []
        self.broken: list[BrokenPlugin] = []

    @classmethod
    def load(cls) -> Registry:
        """Collect the plugins of all installed distributions.

        Raises:
            DuplicateStrategyError: two of them offer one name for one slot.
            PluginError: a plugin's hook raises, or returns something that is no record.
        """
        registry = cls()
        for entry in sorted(entry_points(group=ENTRY_POINT_GROUP), key=lambda entry: entry.name):
            registry._load_entry(entry)
        return registry

    def _load_entry(self, entry: EntryPoint) -> None:
        distribution = entry.dist.name if entry.dist is not None else "unknown"
        version = entry.dist.version if entry.dist is not None else ""
        try:
            plugin = entry.load()
        except Exception as error:  # a stranger's import may raise anything
            reason = f"{type(error).__name__}: {error}"
            self.broken.append(BrokenPlugin(entry.name, distribution, reason))
            return
        self.register(plugin, name=entry.name, distribution=distribution, version=version)

    def register(
        self,
        plugin: ModuleType | object,
        *,
        name: str | None = None,
        distribution: str = "this program",
        version: str = "",
    ) -> None:
        """Add one plugin: an object or module with `@ssmcore.hookimpl` functions.

        Raises:
            DuplicateStrategyError, PluginError: as for `load`.
        """
        name = name or getattr(plugin, "__name__", type(plugin).__name__)
        where = f"plugin {name!r} of {distribution} {version}".rstrip()
        try:
            self._manager.register(plugin, name=f"{distribution}:{name}")
        except (ValueError, pluggy.PluginValidationError) as error:
            raise PluginError(f"{where} cannot be registered: {error}") from error
        for slot, (hook, kind) in _HOOKS.items():
            for record in self._call(plugin, hook, where):
                if not isinstance(record, kind):
                    raise PluginError(
                        f"{where}: {hook} must yield {kind.__name__} objects, got {record!r:.80}"
                    )
                self._add(slot, Registered(record, distribution, version))
        self._observers.extend(self._call(plugin, "ssmcore_observers", where))

    def _call(self, plugin: object, hook: str, where: str) -> list[Any]:
        """What one plugin's implementation of a hook yields."""
        caller = getattr(self._manager.hook, hook)
        implementations = [impl for impl in caller.get_hookimpls() if impl.plugin is plugin]
        items: list[Any] = []
        for implementation in implementations:
            try:
                result = implementation.function()
                if not isinstance(result, Iterable):
                    raise TypeError(f"must return records, got {result!r:.80}")
                items += result
            except Exception as error:  # a stranger's hook may raise anything
                raise PluginError(f"{where}: {hook}: {type(error).__name__}: {error}") from error
        return items

    def _add(self, slot: Slot, registered: Registered) -> None:
        name = registered.record.name
        known = self._records[slot].get(name)
        if known is not None:
            raise DuplicateStrategyError(
                f"{slot} {name!r} is offered by both {known.distribution} {known.version} and"
                f" {registered.distribution} {registered.version}; uninstall one of them"
            )
        self._records[slot][name] = registered

    def records(self, slot: Slot) -> list[Registered]:
        """All strategies for a slot, by name."""
        return [self._records[slot][name] for name in sorted(self._records[slot])]

    def get(self, slot: Slot, name: str) -> Registered:
        """The strategy of a name.

        Raises:
            UnknownStrategyError: nobody offers it; names those there are, the nearest, and plugins
                that could not be loaded.
        """
        found = self._records[slot].get(name)
        if found is not None:
            return found
        message = f"{slot}.name = {name!r}: no installed plugin offers it"
        message += nearest(name, self._records[slot])
        for broken in self.broken:
            message += (
                f"\nplugin {broken.name!r} of {broken.distribution} could not be imported:"
                f" {broken.error}"
            )
        raise UnknownStrategyError(message)

    def observers(self) -> tuple[Observer, ...]:
        """Everyone who wants to be told of steps."""
        return tuple(self._observers)
