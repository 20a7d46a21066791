"""Builders of plugins for tests of registries, selection and the command line."""

from __future__ import annotations

from pathlib import Path

from ssmcore_plugins.baseline import Baseline
from ssmcore_plugins.cache_none import NoCache

import ssmcore
from ssmcore.strategies import CacheModeRecord, DecodeAlgorithmRecord, StrategyOptions


class DecodePlugin:
    """Offers decode algorithms."""

    def __init__(self, *records):
        self.records = records

    @ssmcore.hookimpl
    def ssmcore_decode_algorithms(self):
        return self.records


class CachePlugin:
    """Offers cache modes."""

    def __init__(self, *records):
        self.records = records

    @ssmcore.hookimpl
    def ssmcore_cache_modes(self):
        return self.records


class RememberingDecode(Baseline):
    """The baseline, and what it was created with."""

    def __init__(self, options, context):
        self.options = options
        self.context = context


def decode_record(name, options=StrategyOptions, create=RememberingDecode, **more):
    return DecodeAlgorithmRecord(name, f"Test algorithm {name}.", options, create, **more)


def cache_record(name, options=StrategyOptions, create=NoCache, **more):
    return CacheModeRecord(name, f"Test mode {name}.", options, create, **more)


def refusing_decode(conflict):
    """A decode algorithm whose `check` gives `conflict`."""

    class Refusing(RememberingDecode):
        def check(self, selection):
            return conflict

    return Refusing


def install(site: Path, distribution: str, module: str, source: str, version: str = "1.0") -> None:
    """Put a distribution with one plugin module into a directory of `sys.path`."""
    site.mkdir(exist_ok=True)
    (site / f"{module}.py").write_text(source)
    info = site / f"{distribution.replace('-', '_')}-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: {distribution}\nVersion: {version}\n"
    )
    (info / "entry_points.txt").write_text(f"[ssmcore]\n{module} = {module}\n")


PLUGIN_SOURCE = '''
from typing import Literal

from pydantic import Field as Option
from ssmcore_plugins.baseline import Baseline

import ssmcore
from ssmcore.strategies import DecodeAlgorithmRecord, StrategyOptions


class Options(StrategyOptions):
    every: int = Option(default=4, ge=1, le=9, strict=True)
    """Speak once in so many steps."""
    tone: Literal["low", "high"] = "low"


@ssmcore.hookimpl
def ssmcore_decode_algorithms():
    yield DecodeAlgorithmRecord({name!r}, "Says what it does.", Options, Baseline, preference=-99)
'''


def plugin_source(name: str) -> str:
    """A module that offers one decode algorithm with two options."""
    return PLUGIN_SOURCE.format(name=name)
