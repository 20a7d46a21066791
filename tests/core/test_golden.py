"""Recorded plans of 300 steps over all modes; a plan may say more than they do, never less."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ssmcore.pipeline import Pipeline
from ssmcore.registry import Registry
from ssmcore.settings import Settings
from ssmcore.step import Step

GOLDEN = Path(__file__).parent.parent / "golden" / "plans.jsonl"
CASES = [json.loads(line) for line in GOLDEN.read_text().splitlines()]


def differences(wanted: object, got: object, where: str = "plan") -> list[str]:
    """What `wanted` has and `got` has not, or has otherwise."""
    if isinstance(wanted, dict):
        if not isinstance(got, dict):
            return [f"{where}: wanted an object, got {got}"]
        found = []
        for key, value in wanted.items():
            if key not in got:
                found.append(f"{where}.{key} is missing")
            else:
                found += differences(value, got[key], f"{where}.{key}")
        return found
    same = wanted == got and type(wanted) is type(got)
    return [] if same else [f"{where}: wanted {wanted}, got {got}"]


@pytest.fixture(scope="module")
def registry() -> Registry:
    return Registry.load()


def test_there_are_golden_plans():
    assert len(CASES) == 300


@pytest.mark.parametrize("case", CASES, ids=[case["id"] for case in CASES])
def test_plan_is_as_recorded(case, registry):
    pipeline = Pipeline.from_settings(Settings.from_dict(case["settings"]), registry)
    plan = pipeline.plan(Step.from_dict(case["step"])).to_dict()
    assert differences(case["plan"], plan) == []
