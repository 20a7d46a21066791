"""Decode and prefill on a CPU beside transformers: same random weights, float32, same threads.

Both run in one process, taking turns, and must choose the same tokens. ssmcore's decode times
include planning every step; transformers' are its forward pass alone, without `generate`. Times are
medians over the turns. On a busy machine use `--threads 1`: threads that wait for each other would
measure the others' work.

    python benchmarks/cpu_vs_transformers.py --out benchmarks/results
"""

from __future__ import annotations

import argparse
import datetime
import gc
import inspect
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from rich.console import Console
from rich.table import Table
from ssmcore_plugins.baseline import Baseline
from ssmcore_plugins.cache_none import NoCache
from ssmcore_plugins.decode_first import DecodeFirst
from ssmcore_plugins.graph_none import NoGraphs

from ssmcore.models.config import Mamba2Config
from ssmcore.models.loading import random_model
from ssmcore.models.mamba2 import Mamba2Model
from ssmcore.pipeline import Pipeline
from ssmcore.state import StatePool, slot_tensors
from ssmcore.step import Step
from ssmcore.strategies import CreateContext, Limits, Selection, StrategyOptions

MAMBA2_130M = Mamba2Config(
    vocab_size=50288,
    d_model=768,
    num_layers=24,
    heads=24,
    headdim=64,
    dstate=128,
    groups=1,
    tied_head=True,
)
PROMPT_LEN = 16
Runner = Callable[[], tuple[float, list[int]]]


class Ours:
    """ssmcore without its engine: plans and forward passes."""

    def __init__(self, model: Mamba2Model, batch: int) -> None:
        self.model = model
        limits = Limits(max_num_seqs=batch, chunk_size=model.config.chunk_size)
        options, context = StrategyOptions(), CreateContext(limits)
        self.decode = Baseline(options, context)
        selection = Selection(
            DecodeFirst(options, context),
            NoCache(options, context),
            self.decode,
            NoGraphs(options, context),
            {},
            limits,
        )
        self.pipeline = Pipeline(selection, device="cpu", num_slots=1 + batch)
        tensors = slot_tensors(model.mixer_shape(), self.decode)
        self.pool = StatePool(tensors, model.config.num_layers, 1 + batch, "cpu")
        self.table = [[1 + row] for row in range(batch)]
        self.computed = 0

    def step(self, tokens: torch.Tensor, prefill: bool) -> torch.Tensor:
        """Next tokens, (batch,), after `tokens`: (batch, length)."""
        batch, length = tokens.shape
        self.computed = length if prefill else self.computed + length
        step = Step.of(
            list(range(0, (batch + 1) * length, length)),
            [self.computed] * batch,
            [prefill] * batch,
            self.table,
        )
        plan = self.pipeline.plan(step)
        hidden = self.model.forward(tokens.flatten(), plan, self.pool, self.decode)
        return self.model.logits(hidden.view(batch, length, -1)[:, -1]).argmax(-1)


class Theirs:
    """transformers' model with its cache."""

    def __init__(self, model: Any) -> None:
        self.model = model
        parameters = inspect.signature(model.forward).parameters
        self.argument = "cache" if "cache" in parameters else "cache_params"
        self.cache: Any = None

    @torch.inference_mode()
    def step(self, tokens: torch.Tensor, prefill: bool) -> torch.Tensor:
        """Next tokens, (batch,), after `tokens`: (batch, length)."""
        cache = {self.argument: None if prefill else self.cache}
        out = self.model(tokens, use_cache=True, logits_to_keep=1, **cache)
        self.cache = getattr(out, self.argument)
        return out.logits[:, -1].argmax(-1)


def transformers_model(model: Mamba2Model) -> Any:
    """The same weights in transformers' model."""
    config, weights = model.config, model.weights
    theirs_config = transformers.Mamba2Config(
        vocab_size=config.vocab_size,
        hidden_size=config.d_model,
        num_hidden_layers=config.num_layers,
        num_heads=config.heads,
        head_dim=config.headdim,
        state_size=config.dstate,
        n_groups=config.groups,
        chunk_size=config.chunk_size,
        tie_word_embeddings=True,
    )

    def plain(weight: torch.Tensor) -> torch.Tensor:
        return weight.to_dense() if weight.is_mkldnn else weight

    tensors = {
        "backbone.embeddings.weight": weights.embedding,
        "lm_head.weight": weights.embedding,
        "backbone.norm_f.weight": weights.final_norm,
    }
    for index, layer in enumerate(weights.layers):
        mixer = {
            "in_proj.weight": plain(layer.in_proj),
            "conv1d.weight": layer.conv_weight[:, None],
            "conv1d.bias": layer.conv_bias,
            "dt_bias": layer.dt_bias,
            "A_log": (-layer.A).log(),
            "D": layer.D,
            "norm.weight": layer.gate_norm,
            "out_proj.weight": plain(layer.out_proj),
        }
        tensors[f"backbone.layers.{index}.norm.weight"] = layer.norm
        tensors |= {f"backbone.layers.{index}.mixer.{k}": v for k, v in mixer.items()}
    with torch.device("meta"):
        theirs = transformers.Mamba2ForCausalLM(theirs_config)
    theirs.load_state_dict(tensors, assign=True)
    return theirs.eval()


def decode_runner(side: Ours | Theirs, batch: int, steps: int) -> Runner:
    """Seconds of one decode step, after a prefill that is not timed; and the tokens chosen."""

    def run() -> tuple[float, list[int]]:
        token = side.step(prompt(batch, PROMPT_LEN), prefill=True)
        token = side.step(token[:, None], prefill=False)
        chosen = [token]
        start = time.perf_counter()
        for _ in range(steps):
            token = side.step(token[:, None], prefill=False)
            chosen.append(token)
        seconds = (time.perf_counter() - start) / steps
        return seconds, torch.stack(chosen).flatten().tolist()

    return run


def prefill_runner(side: Ours | Theirs, length: int) -> Runner:
    """Seconds of one prefill, and the token chosen."""

    def run() -> tuple[float, list[int]]:
        tokens = prompt(1, length)
        start = time.perf_counter()
        token = side.step(tokens, prefill=True)
        return time.perf_counter() - start, token.tolist()

    return run


def prompt(batch: int, length: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(batch + length)
    return torch.randint(MAMBA2_130M.vocab_size, (batch, length), generator=generator)


def compare(name: str, tokens: int, ours: Runner, theirs: Runner, turns: int) -> dict[str, Any]:
    """Medians of both, taking turns; the first turn warms up and is not counted."""
    times: dict[str, list[float]] = {"ssmcore": [], "transformers": []}
    for turn in range(turns + 1):
        chosen = []
        for side, run in (("ssmcore", ours), ("transformers", theirs)):
            gc.collect()
            seconds, picked = run()
            chosen.append(picked)
            if turn:
                times[side].append(seconds)
        if chosen[0] != chosen[1]:
            sys.exit(f"{name}: the two chose different tokens; the comparison means nothing")
    medians = {side: statistics.median(values) for side, values in times.items()}
    return {
        "case": name,
        "tokens": tokens,
        "seconds": medians,
        "spread": {side: [min(values), max(values)] for side, values in times.items()},
        "tokens_per_second": {side: tokens / value for side, value in medians.items()},
        "speedup": medians["transformers"] / medians["ssmcore"],
    }


def cpu_name() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--turns", type=int, default=9)
    parser.add_argument("--steps", type=int, default=16, help="decode steps of a turn")
    parser.add_argument("--only", default="", help="cases whose name contains this")
    parser.add_argument("--out", type=Path, help="directory for a JSON file and a table")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    transformers.logging.set_verbosity_error()

    model = random_model(MAMBA2_130M)
    theirs = transformers_model(model)
    cases: list[tuple[str, int, Callable[[Ours | Theirs], Runner], int]] = [
        (f"decode, batch {n}", n, lambda side, n=n: decode_runner(side, n, args.steps), n)
        for n in (1, 8)
    ]
    cases += [
        (f"prefill, {n} tokens", n, lambda side, n=n: prefill_runner(side, n), 1)
        for n in (512, 2048)
    ]
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else None
    results = []
    for name, tokens, runner, batch in cases:
        if args.only in name:
            pair = runner(Ours(model, batch)), runner(Theirs(theirs))
            results.append(compare(name, tokens, *pair, args.turns))

    report = {
        "what": "mamba2-130m's shape, random weights, float32, CPU",
        "date": datetime.date.today().isoformat(),
        "cpu": cpu_name(),
        "cores": os.cpu_count(),
        "load_average_before": load,
        "threads": args.threads,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "command": " ".join(["python", *sys.argv]),
        "turns": args.turns,
        "results": results,
    }
    table = Table(title=f"{report['what']}; {report['cpu']}, {args.threads} threads")
    for column in ("case", "ssmcore, tokens/s", "transformers, tokens/s", "times faster"):
        table.add_column(column, justify="left" if column == "case" else "right")
    for result in results:
        speeds = result["tokens_per_second"]
        cells = [f"{speeds['ssmcore']:,.1f}", f"{speeds['transformers']:,.1f}"]
        table.add_row(result["case"], *cells, f"{result['speedup']:.2f}")
    Console().print(table)
    if args.out:
        args.out.mkdir(parents=True, exist_ok=True)
        stem = f"cpu_vs_transformers-{report['date']}"
        (args.out / f"{stem}.json").write_text(json.dumps(report, indent=2) + "\n")
        with (args.out / f"{stem}.txt").open("w") as file:
            Console(file=file, width=100).print(table)


if __name__ == "__main__":
    main()
