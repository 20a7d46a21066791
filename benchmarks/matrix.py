"""The full matrix on this machine, in several processes, and one record of all its results.

    python benchmarks/matrix.py --device cuda --workers 12 --json FILE

Each worker runs one shard of `python -m pytest tests/matrix --full` on one thread: a pairwise cover
first, then the rest shuffled. With `--parts` and `--part` a run is split over several calls; with
`--limit` cases that would start after so many seconds are counted as skipped.

The record has a line for every case that ran, the refusals counted by reason, and the greatest
error by state dtype; it exits with 1 if a case failed. `--merge` makes one record of several parts'
records.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent

COLUMNS = (
    "result",
    "tokens",
    "differing",
    "logprob_error",
    "preemptions",
    "prefix_hits",
    "graph_steps",
    "steps",
    "accepted_drafts",
    "seconds",
)


def run_shards(
    device: str, cover: bool, workers: int, part: int, parts: int, limit: float
) -> list[dict[str, Any]]:
    """Reports of `workers` shards that run side by side."""
    environ = {**os.environ, "OMP_NUM_THREADS": "1"}
    with tempfile.TemporaryDirectory() as folder:
        files = [Path(folder) / f"{shard}.json" for shard in range(workers)]
        started = [
            subprocess.Popen(
                [
                    *(sys.executable, "-m", "pytest", "tests/matrix/test_matrix.py"),
                    *(() if cover else ("--full",)),
                    *("--device", device, "--tb=short", "-p", "no:cacheprovider"),
                    *("--shard", f"{part + parts * shard}/{parts * workers}"),
                    *("--matrix-seconds", str(limit), "--matrix-json", str(file)),
                ],
                cwd=ROOT,
                env=environ,
            )
            for shard, file in enumerate(files)
        ]
        codes = [process.wait() for process in started]
        if missing := [shard for shard, file in enumerate(files) if not file.exists()]:
            raise SystemExit(f"shards {missing} wrote no report; exit codes {codes}")
        return [json.loads(file.read_text(encoding="utf-8")) for file in files]


def record_of(reports: Sequence[dict[str, Any]], seconds: float, command: str) -> dict[str, Any]:
    """One record of several reports of `--matrix-json`."""
    counts: Counter[str] = Counter()
    refusals: Counter[str] = Counter()
    errors: dict[str, float] = defaultdict(float)
    runs = []
    failures = []
    for case in (case for report in reports for case in report["cases"]):
        counts[case["result"]] += 1
        if case["result"] == "skipped":
            continue
        if case["result"] not in ("same", "bounded"):
            if case["result"] in ("impossible", "unavailable"):
                refusals[f"{case['result']}: {case['reason']}"] += 1
                continue
            failures.append(case)
            if "logprob_error" not in case:
                continue
        axes = case["case"]
        error = case["logprob_error"]
        errors[axes["state_dtype"]] = max(errors[axes["state_dtype"]], error)
        name = "/".join(str(value) for value in axes.values())
        runs.append([name, *(_short(case[column]) for column in COLUMNS)])
    return {
        "machine": reports[0]["machine"],
        "command": command,
        "seconds": round(seconds, 1),
        "counts": dict(counts),
        "tokens_compared": sum(run[1 + COLUMNS.index("tokens")] for run in runs),
        "greatest_logprob_error": dict(errors),
        "refusals": dict(refusals.most_common()),
        "axes": list(reports[0]["cases"][0]["case"]),
        "columns": ["case", *COLUMNS],
        "failures": failures,
        "runs": sorted(runs),
    }


def merged(records: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """One record of the records of all parts."""

    def summed(key: str) -> dict[str, int]:
        total: Counter[str] = Counter()
        for record in records:
            total.update(record[key])
        return dict(total.most_common())

    errors = [record["greatest_logprob_error"] for record in records]
    return {
        **records[0],
        "command": [record["command"] for record in records],
        "seconds": round(sum(record["seconds"] for record in records), 1),
        "counts": summed("counts"),
        "tokens_compared": sum(record["tokens_compared"] for record in records),
        "greatest_logprob_error": {
            dtype: max(error.get(dtype, 0.0) for error in errors)
            for dtype in sorted({dtype for error in errors for dtype in error})
        },
        "refusals": summed("refusals"),
        "failures": [case for record in records for case in record["failures"]],
        "runs": sorted(run for record in records for run in record["runs"]),
    }


def _short(value: Any) -> Any:
    return float(f"{value:.3g}") if isinstance(value, float) else value


def write(path: Path, record: dict[str, Any]) -> None:
    """A line a run, so that records can be read and compared."""
    head = {key: value for key, value in record.items() if key != "runs"}
    text = json.dumps(head, indent=1)[:-2]
    runs = ",\n".join("  " + json.dumps(run) for run in record["runs"])
    path.write_text(f'{text},\n "runs": [\n{runs}\n ]\n}}\n', encoding="utf-8")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cpu", help="cpu, cuda or cuda:N")
    parser.add_argument("--cover", action="store_true", help="the pairwise cover alone")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--part", type=int, default=1, help="which part of --parts, from 1")
    parser.add_argument("--parts", type=int, default=1)
    parser.add_argument("--limit", type=float, default=1e9, help="seconds for starting cases")
    parser.add_argument("--json", type=Path, required=True, help="where the record goes")
    parser.add_argument("--merge", type=Path, nargs="+", help="records of parts to put together")
    options = parser.parse_args()
    if not 1 <= options.part <= options.parts or options.workers < 1:
        parser.error("--part counts from 1 to --parts, --workers from 1")
    if options.merge:
        records = [json.loads(path.read_text(encoding="utf-8")) for path in options.merge]
        record = merged(records)
    else:
        begun = time.perf_counter()
        sizes = (options.workers, options.part, options.parts, options.limit)
        reports = run_shards(options.device, options.cover, *sizes)
        command = f"benchmarks/matrix.py --device {options.device}"
        command += " --cover" * options.cover + "".join(
            f" --{name} {size:g}"
            for name, size in zip(("workers", "part", "parts", "limit"), sizes, strict=True)
        )
        record = record_of(reports, time.perf_counter() - begun, command)
    write(options.json, record)
    print(json.dumps({key: record[key] for key in ("seconds", "counts", "tokens_compared")}))
    print("greatest error of a log-probability:", record["greatest_logprob_error"])
    for case in record["failures"]:
        print("failed:", json.dumps(case))
    return 1 if record["failures"] else 0


if __name__ == "__main__":
    sys.exit(main())
