"""How many slots the state pool gets: from `cache.memory`, what is free, and what can be used."""

from __future__ import annotations

import os
from pathlib import Path

import torch

from ssmcore.errors import CapacityError
from ssmcore.settings import Settings
from ssmcore.strategies import CacheMode, Limits
from ssmcore.validation import MAX_SLOTS

AUTO_FRACTION = 0.8
AUTO_BYTES_ON_CPU = 2**30


def free_memory(device: torch.device) -> int:
    """Bytes that could be taken on `device` now; on a CPU a container's limit counts."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    meminfo = Path("/proc/meminfo")
    if meminfo.is_file():
        for line in meminfo.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                free = int(line.split()[1]) * 1024
    return min(free, *_container_rooms(), free)


def _container_rooms() -> list[int]:
    """Bytes left under the container's limits, as control groups version 2 and 1 say."""
    rooms = []
    for limit, used in (
        ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
        (
            "/sys/fs/cgroup/memory/memory.limit_in_bytes",
            "/sys/fs/cgroup/memory/memory.usage_in_bytes",
        ),
    ):
        try:
            rooms.append(max(0, int(Path(limit).read_text()) - int(Path(used).read_text())))
        except (OSError, ValueError):  # no such group, or no limit ("max")
            continue
    return rooms


def slots_of_one_request(cache: CacheMode, limits: Limits) -> int:
    """Most slots that one request holds at once, whatever its length."""
    longest_step = min(limits.max_num_batched_tokens, limits.max_model_len)
    written = len(cache.columns_written(0, longest_step))
    if cache.block_size is None:
        return written + limits.num_spec_tokens
    # a step that starts within a block touches one more, and reads one that it does not write
    return min(written + 2, cache.table_width(limits.max_model_len) + 1) + limits.num_spec_tokens


def choose_num_slots(
    settings: Settings, cache: CacheMode, limits: Limits, slot_bytes: int, device: torch.device
) -> int:
    """Slots of the pool, the null slot included.

    Without reuse, slots beyond what `engine.max_num_seqs` requests hold would never be used and are
    not made. With reuse an amount that was asked for is taken whole; "auto" takes at most what as
    many requests of `engine.max_model_len` tokens can fill.

    Raises:
        CapacityError: not one request fits; says what would.
    """
    least = slots_of_one_request(cache, limits)
    amount = settings.cache.memory_amount
    useful = limits.max_num_seqs * least
    if cache.reuses_states:
        useful = max(useful, limits.max_num_seqs * cache.table_width(limits.max_model_len))
        if amount.nbytes is not None or amount.fraction is not None:
            useful = MAX_SLOTS - 1
    if amount.nbytes is not None:
        budget = amount.nbytes
    else:
        budget = int(free_memory(device) * (amount.fraction or AUTO_FRACTION))
        if amount.fraction is None and device.type == "cpu":
            budget = min(budget, max(AUTO_BYTES_ON_CPU, (least + 1) * slot_bytes))
    fitting = budget // slot_bytes - 1
    if fitting < least:
        raise CapacityError(
            f"cache.memory = {settings.cache.memory!r} gives {budget} bytes, room for"
            f" {max(fitting, 0)} slots of {slot_bytes} bytes besides the null slot; one request"
            f" needs {least}: give at least {(least + 1) * slot_bytes} bytes"
        )
    return min(fitting, useful) + 1
