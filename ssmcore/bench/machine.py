"""Where and when something was measured: what a reader of the figures needs to compare them."""

from __future__ import annotations

import os
import platform
import sys
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any


def machine_facts() -> dict[str, Any]:
    """Date, processor, GPU if there is one, and versions; no name or path of the machine."""
    import torch

    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    return {
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "cpu": _cpu(),
        "cores": len(os.sched_getaffinity(0))
        if hasattr(os, "sched_getaffinity")
        else os.cpu_count(),
        "threads": torch.get_num_threads(),
        "gpu": gpu,
        "system": platform.system(),
        "python": platform.python_version(),
        "ssmcore": version("ssmcore"),
        "torch": torch.__version__,
        "numpy": version("numpy"),
    }


def _cpu() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def command_line() -> str:
    """This command as it was given, files by their bare names."""
    return " ".join(["ssmcore", *map(_bare, sys.argv[1:])])


def _bare(argument: str) -> str:
    option, equals, value = argument.rpartition("=")
    path = Path(value)
    in_a_folder = path.is_absolute() or (path.parent != Path() and path.parent.is_dir())
    return f"{option}{equals}{path.name}" if in_a_folder else argument
