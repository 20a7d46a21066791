"""Step cases: a step and its settings as one JSON object, and the plan or the error as another.

The format is that of `docs/steps.md`. A case is planned on the host alone, without a model and
without a device; whatever is wrong with it becomes its own error object.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

from ssmcore.errors import SsmcoreError, StepError
from ssmcore.jsonlines import JsonLineError, Line, parse_line
from ssmcore.pipeline import Pipeline
from ssmcore.plan import StepPlan
from ssmcore.registry import Registry
from ssmcore.selection import select
from ssmcore.settings import Settings
from ssmcore.settings_sources import Source, file_source, override_source
from ssmcore.step import Step

MAX_PLAN_BYTES = 2**26
"""A printed plan beyond this (some 16 million numbers) helps nobody and may fill the memory."""

_KEPT_PIPELINES = 16
_MOST_MESSAGE = 2000
_READ = ("settings", "step")
_KNOWN = ("id", *_READ, "plan", "error")


class CaseError(SsmcoreError):
    """A case that is no JSON object with the right keys."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


class Case(NamedTuple):
    """What is to be planned; `settings` is as it stands in the case."""

    settings: Mapping[str, Any]
    step: Any


class Planner:
    """Plans cases, keeping the pipelines of the settings it met last.

    Args:
        pipeline_of: makes the pipeline of a case's settings; raises SsmcoreError.
    """

    def __init__(self, pipeline_of: Callable[[Mapping[str, Any]], Pipeline]) -> None:
        def of_text(settings: str) -> Pipeline:
            return pipeline_of(json.loads(settings))

        self._pipeline = lru_cache(_KEPT_PIPELINES)(of_text)

    @classmethod
    def with_defaults(cls, config: Path | None = None, overrides: Sequence[str] = ()) -> Planner:
        """A planner whose cases' settings stand above a file's and below `KEY=VALUE` overrides.

        Neither `ssmcore.toml` nor the environment is read: a case means the same everywhere.

        Raises:
            SsmcoreError: the file or an override is bad, or a plugin is.
        """
        below = [] if config is None else [file_source(config)]
        above = [override_source(overrides)] if overrides else []
        Settings.from_sources([*below, *above])
        registry = Registry.load()

        def pipeline_of(settings: Mapping[str, Any]) -> Pipeline:
            sources = [*below, Source("settings", dict(settings)), *above]
            selection = select(Settings.from_sources(sources), registry)
            return Pipeline(
                selection, observers=registry.observers(), max_plan_bytes=MAX_PLAN_BYTES
            )

        return cls(pipeline_of)

    def plan(self, case: Case) -> StepPlan:
        """The plan of a case.

        Raises:
            SsmcoreError: the settings or the step are refused.
        """
        pipeline = self._pipeline(json.dumps(case.settings, sort_keys=True))
        return pipeline.plan(Step.from_dict(case.step))

    def answer(
        self, line: Line, show: Callable[[StepPlan], Any] = StepPlan.to_dict
    ) -> dict[str, Any]:
        """The output object of one input line: its `id`, and its `plan` or its `error`.

        `show` makes of a plan what is put under `plan`.
        """
        name: Any = None
        try:
            value = _object(line)
            name = value.get("id")
            json.dumps(name)  # what could be read may still be too deep to write
            return {"id": name, "plan": show(self.plan(case_of(value)))}
        except JsonLineError as error:
            if isinstance(error.value, dict):
                name = error.value.get("id")
            return _error(name, "json", f"line {line.number}: {error}", None)
        except StepError as error:
            return _error(name, error.code, str(error), error.row)
        except SsmcoreError as error:
            return _error(name, error.code, str(error), None)
        except RecursionError:
            return _error(None, "json", f"line {line.number}: nested too deeply", None)
        except Exception as error:
            fault = f"{type(error).__name__}: {error}"
            return _error(name, "internal", f"{fault}; this is a fault of ssmcore", None)


def case_of(value: Mapping[str, Any]) -> Case:
    """The case in a JSON object; a recorded `plan` or `error` beside it is not read.

    Raises:
        CaseError: an unknown or missing key, or a value that is no object.
    """
    for key in value:
        if key not in _KNOWN:
            raise CaseError("key", f"unknown key {key!r:.80}; known: {', '.join(_KNOWN)}")
    if "step" not in value:
        raise CaseError("key", "the case lacks 'step'")
    settings = value.get("settings", {})
    if not isinstance(settings, dict):
        raise CaseError("type", f"settings must be an object, got {settings!r:.40}")
    return Case(settings, value["step"])


def _object(line: Line) -> dict[str, Any]:
    value = parse_line(line)
    if not isinstance(value, dict):
        raise CaseError("type", f"line {line.number}: must be a JSON object, got {value!r:.40}")
    return value


def _error(name: Any, code: str, message: str, row: int | None) -> dict[str, Any]:
    return {"id": name, "error": {"code": code, "message": message[:_MOST_MESSAGE], "row": row}}
