"""A picture of a replay: latencies as distributions, load over time. Needs the extra `plot`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ssmcore.bench.metrics import Measurements, time_per_output_token
from ssmcore.errors import SettingsError, UnavailableError

_MISSING = '--plot needs matplotlib, which is not installed: pip install "ssmcore[plot]"'


def check_plot(path: Path) -> None:
    """Refuse before a long replay what would fail after it.

    Raises:
        UnavailableError: matplotlib is not installed.
        SettingsError: a folder that is not there, or a kind of file that cannot be drawn.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
    except ImportError as error:
        raise UnavailableError(_MISSING) from error
    known = FigureCanvasAgg.get_supported_filetypes()
    if path.suffix.lower().removeprefix(".") not in known:
        raise SettingsError(
            f"--plot {path}: the name must end in one of {', '.join(sorted(known))}"
        )
    if not path.resolve().parent.is_dir():
        raise SettingsError(f"--plot {path}: there is no folder {path.parent}")


def save_plot(measured: Measurements, title: str, path: Path) -> None:
    """Draw a replay to a file.

    Raises:
        UnavailableError: matplotlib is not installed.
        SettingsError: the file cannot be written.
    """
    check_plot(path)
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 7), layout="constrained")
    figure.suptitle(title)
    axes = figure.subplots(2, 2)
    served = [record for record in measured.requests if record.error is None]
    firsts = [r.first_token - r.arrival for r in served if r.first_token is not None]
    waits = [r.first_scheduled - r.arrival for r in served if r.first_scheduled is not None]
    per_token = [1000 * value for r in served if (value := time_per_output_token(r)) is not None]
    _cumulative(axes[0, 0], {"time to first token": firsts, "queueing": waits}, "seconds")
    _cumulative(axes[0, 1], {"time per output token": per_token}, "milliseconds")

    times = [step.finished for step in measured.steps]
    rows = axes[1, 0]
    rows.plot(times, [step.rows for step in measured.steps], lw=0.8, label="rows in the step")
    rows.plot(times, [step.waiting for step in measured.steps], lw=0.8, label="waiting requests")
    slots = axes[1, 1]
    slots.plot(times, [step.slots for step in measured.steps], lw=0.8, label="slots in use")
    slots.axhline(measured.total_slots, color="gray", lw=0.8, ls="--", label="slots in all")
    for axis in (rows, slots):
        axis.set_xlabel("seconds since the first request")
        axis.set_ylim(bottom=0)
        axis.legend()
    try:
        figure.savefig(path, dpi=120)
    except OSError as error:
        raise SettingsError(f"--plot {path}: {error.strerror or error}") from error


def _cumulative(axis: Any, series: dict[str, list[float]], unit: str) -> None:
    """Share of requests (vertical) that took at most so long (horizontal)."""
    for name, values in series.items():
        ordered = sorted(values)
        share = [100 * (at + 1) / len(ordered) for at in range(len(ordered))]
        axis.step(ordered, share, where="post", label=name)
    axis.set_xlabel(unit)
    axis.set_ylabel("% of requests at most")
    axis.set_ylim(0, 101)
    axis.legend()
