"""Options of the matrix, its cases as parameters, and the record of their results."""

from __future__ import annotations

import json
import time
from collections import Counter
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ssmcore.bench.machine import machine_facts
from ssmcore.errors import UnavailableError
from ssmcore.testing.matrix import Case, shard_of
from ssmcore.testing.pairwise import pairwise_cover
from ssmcore.testing.runs import Workbench

BEGUN = pytest.StashKey[float]()
RECORDS = pytest.StashKey[list[dict[str, Any]]]()


def pytest_addoption(parser):
    group = parser.getgroup("matrix")
    group.addoption("--full", action="store_true", help="every case, not a pairwise cover")
    group.addoption("--shard", metavar="I/N", help="part I of N of the cases")
    group.addoption("--device", help="cpu, cuda or cuda:N (default: cpu)")
    group.addoption("--matrix-seed", type=int, help="of the pairwise cover (default: 0)")
    group.addoption("--matrix-seconds", type=float, help="skip cases that would start later")
    group.addoption("--matrix-json", type=Path, metavar="FILE", help="write every case's result")


def option(config, name: str, default: Any) -> Any:
    """An option's value; without this folder named on the command line there are only defaults."""
    return config.getoption(name, None) or default


@cache
def workbench(device: str) -> Workbench:
    torch.set_num_threads(1)  # sums in one order, and shards do not crowd each other out
    return Workbench(device)


@pytest.fixture(scope="session")
def bench(pytestconfig) -> Workbench:
    return workbench(option(pytestconfig, "--device", "cpu"))


@pytest.fixture
def record(pytestconfig):
    """Takes a dictionary for the record; skips the test when the time is over."""
    append = pytestconfig.stash.setdefault(RECORDS, []).append
    begun = pytestconfig.stash.setdefault(BEGUN, time.monotonic())
    late = time.monotonic() - begun > option(pytestconfig, "--matrix-seconds", float("inf"))

    def take(entry: dict[str, Any]) -> None:
        if late:
            append({**entry, "result": "skipped"})
            pytest.skip("--matrix-seconds are over")
        append(entry)

    return take


def chosen_cases(config, bench: Workbench) -> dict[str, list[Case]]:
    """Cases that must run and those that must be refused: all, or pairwise covers of each kind."""
    kinds: dict[str, list[Case]] = {"run": [], "impossible": [], "unavailable": []}
    full, seed = option(config, "--full", False), option(config, "--matrix-seed", 0)
    for case in bench.matrix.cases():
        refusal = bench.matrix.refusal(case)
        kinds["run" if refusal is None else refusal.kind].append(case)
    for kind, cases in kinds.items():
        costs = [case.cost for case in cases]
        order = pairwise_cover([case.values for case in cases], seed, costs)
        if full:  # shuffled behind the cover, so that shards get equal shares of slow cases
            shuffled = np.random.default_rng(seed).permutation(len(cases)).tolist()
            order = list(dict.fromkeys([*order, *shuffled]))
        kinds[kind] = [cases[at] for at in order]
    shard = option(config, "--shard", "1/1")
    number, _, count = shard.partition("/")
    try:
        return {kind: shard_of(cases, int(number), int(count)) for kind, cases in kinds.items()}
    except ValueError as error:
        raise pytest.UsageError(f"--shard {shard}: {error}") from None


CASES = pytest.StashKey[dict[str, list[Case]]]()


def pytest_generate_tests(metafunc):
    wanted = {"case": ("run",), "refused_case": ("impossible", "unavailable")}
    for argument in wanted.keys() & set(metafunc.fixturenames):
        config = metafunc.config
        if CASES not in config.stash:
            try:
                bench = workbench(option(config, "--device", "cpu"))
            except UnavailableError as error:
                raise pytest.UsageError(str(error)) from None
            config.stash[CASES] = chosen_cases(config, bench)
        cases = [case for kind in wanted[argument] for case in config.stash[CASES][kind]]
        metafunc.parametrize(argument, cases, ids=str)


def pytest_sessionfinish(session):
    config = session.config
    path = option(config, "--matrix-json", None)
    if path is None:
        return
    records = config.stash.get(RECORDS, [])
    report = {
        "machine": machine_facts(),
        "options": {
            "device": option(config, "--device", "cpu"),
            "full": option(config, "--full", False),
            "shard": option(config, "--shard", "1/1"),
            "seed": option(config, "--matrix-seed", 0),
        },
        "counts": dict(Counter(one["result"] for one in records)),
        "cases": records,
    }
    path.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
