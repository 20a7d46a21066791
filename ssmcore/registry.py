"""Registries: the plugin manager run once at start-up, and the records it collected.

Plugins come from entry points of the group `ssmcore`, the bundled ones included. One that cannot be
imported is kept aside with its error, and matters only when something it may have offered is asked
for.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from importlib.metadata import EntryPoint, entry_points
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
    StrategyOptions,
    StrategyRecord,
)

ENTRY_POINT_GROUP = "ssmcore"

_HOOKS: dict[Slot, tuple[str, type[StrategyRecord[Any]]]] = {
    "classifier": ("ssmcore_batch_classifiers", BatchClassifierRecord),
    "cache": ("ssmcore_cache_modes", CacheModeRecord),
    "decode": ("ssmcore_decode_algorithms", DecodeAlgorithmRecord),
    "graph": ("ssmcore_graph_paddings", GraphPaddingRecord),
}


_RESERVED = {slot: {"name"} for slot in SLOTS} | {"cache": {"name", "state_dtype", "memory"}}
"""Keys of a slot's section that are the core's own."""


@dataclass(frozen=True, slots=True)
class Registered:
    """A record and the distribution that offers it."""

    record: StrategyRecord[Any]
    distribution: str
    version: str

    @property
    def origin(self) -> str:
        """The distribution, with its version where it has one."""
        return f"{self.distribution} {self.version}".rstrip()

    def unavailable(self, device: str) -> str | None:
        """Why the strategy cannot run on `device` here; a record that cannot say is a reason too.

        Args:
            device: "cpu", "cuda" or "cuda:N".
        """
        try:
            return self.record.unavailable(device.partition(":")[0])
        except Exception as error:  # a stranger's check may raise anything
            return f"{self.origin} fails to tell: {type(error).__name__}: {error}"


@dataclass(frozen=True, slots=True)
class BrokenPlugin:
    """A plugin that could not be imported, and why."""

    name: str
    distribution: str
    version: str
    cause: BaseException

    @property
    def error(self) -> str:
        """The exception as one line."""
        return f"{type(self.cause).__name__}: {self.cause}"

    def __str__(self) -> str:
        where = f"{self.distribution} {self.version}".rstrip()
        return f"plugin {self.name!r} of {where} could not be imported: {self.error}"


class Registry:
    """All strategies that plugins offer, by slot and name.

    Args:
        plugins: to register at once; `Registry.load` takes those that are installed.
    """

    def __init__(self, plugins: Iterable[object] = ()) -> None:
        self._manager = pluggy.PluginManager(hookspecs.PROJECT)
        self._manager.add_hookspecs(hookspecs)
        self._records: dict[Slot, dict[str, Registered]] = {slot: {} for slot in SLOTS}
        self._observers: list[Observer] = []
        self.broken: list[BrokenPlugin] = []
        for plugin in plugins:
            self.register(plugin)

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
        except (Exception, SystemExit) as error:  # a stranger's import may raise anything
            self.broken.append(BrokenPlugin(entry.name, distribution, version, error))
            return
        self.register(plugin, name=entry.name, distribution=distribution, version=version)

    def register(
        self,
        plugin: object,
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
        other = self._manager.get_name(plugin)
        if other is not None:
            other = other.rpartition(":")[0]
            raise PluginError(f"{where} is the same object as {other}; name it in one entry point")
        try:
            self._manager.register(plugin, name=f"{distribution}:{name}:{id(plugin)}")
        except (ValueError, pluggy.PluginValidationError) as error:
            raise PluginError(f"{where} cannot be registered: {error}") from error
        self._check_hooks(plugin, where)
        for slot, (hook, kind) in _HOOKS.items():
            for record in self._call(plugin, hook, where):
                _check_record(record, kind, slot, f"{where}: {hook}")
                self._add(slot, Registered(record, distribution, version))
        for observer in self._call(plugin, "ssmcore_observers", where):
            for method in ("step_planned", "step_run"):
                if not callable(getattr(observer, method, None)):
                    raise PluginError(
                        f"{where}: ssmcore_observers must yield observers, got {observer!r:.80},"
                        f" which has no method {method}"
                    )
            self._observers.append(observer)

    def _check_hooks(self, plugin: object, where: str) -> None:
        """Refuse a plugin with a hook that nobody would call, or with none."""
        known = [name for name in dir(hookspecs) if name.startswith(f"{hookspecs.PROJECT}_")]
        callers = self._manager.get_hookcallers(plugin) or []
        for caller in callers:
            if not caller.has_spec():
                raise PluginError(
                    f"{where}: there is no hook {caller.name!r}{nearest(caller.name, known)}"
                )
        if not callers:
            raise PluginError(
                f"{where} implements no hook: decorate its functions with @ssmcore.hookimpl;"
                f" hooks: {', '.join(known)}"
            )

    def _call(self, plugin: object, hook: str, where: str) -> list[Any]:
        """What one plugin's implementation of a hook yields."""
        caller = getattr(self._manager.hook, hook)
        implementations = [impl for impl in caller.get_hookimpls() if impl.plugin is plugin]
        items: list[Any] = []
        for implementation in implementations:
            try:
                result = implementation.function()
                if not isinstance(result, Iterable):
                    raise TypeError(f"must return an iterable, got {result!r:.80}")
                items += result
            except Exception as error:  # a stranger's hook may raise anything
                raise PluginError(f"{where}: {hook}: {type(error).__name__}: {error}") from error
        return items

    def _add(self, slot: Slot, registered: Registered) -> None:
        name = registered.record.name
        known = self._records[slot].get(name)
        if known is not None:
            raise DuplicateStrategyError(
                f"{slot} strategy {name!r} is offered by both {known.origin} and"
                f" {registered.origin}; uninstall one of them"
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
        message += "".join(f"\n{broken}" for broken in self.broken)
        cause = self.broken[0].cause if self.broken else None
        raise UnknownStrategyError(message) from cause

    def observers(self) -> tuple[Observer, ...]:
        """Everyone who wants to be told of steps."""
        return tuple(self._observers)


def _check_record(record: object, kind: type[StrategyRecord[Any]], slot: Slot, where: str) -> None:
    """Refuse what is no record of the slot, or one that could not be chosen."""
    if not isinstance(record, kind):
        raise PluginError(f"{where} must yield {kind.__name__} objects, got {record!r:.80}")
    if not isinstance(record.name, str) or not record.name.strip():
        raise PluginError(f"{where}: a strategy's name must be text, got {record.name!r:.80}")
    where = f"{where}: {record.name!r}"
    if not (isinstance(record.options, type) and issubclass(record.options, StrategyOptions)):
        raise PluginError(
            f"{where}: options must be a subclass of StrategyOptions, got {record.options!r:.80}"
        )
    for key in sorted(_RESERVED[slot] & record.options.model_fields.keys()):
        raise PluginError(f"{where}: no option may be called {key!r}; {slot}.{key} is a core key")
    for attribute in ("create", "unavailable"):
        if not callable(getattr(record, attribute)):
            raise PluginError(f"{where}: {attribute} must be callable")
