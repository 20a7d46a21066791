"""Runs scheduled steps on the model: token ids up, plan, forward pass or a captured graph, logits.

On a GPU decode steps replay CUDA graphs, one per padded row count, all from one memory pool; a
graph is chosen by the plan's key, never by the step's shape alone. On a CPU the padded plan runs
eagerly, so that the same rules hold and can be tested there.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from ssmcore.engine.scheduler import Scheduled
from ssmcore.models.mamba2 import Mamba2Model
from ssmcore.pipeline import Pipeline
from ssmcore.plan import StepPlan
from ssmcore.state import StatePool
from ssmcore.step import Step
from ssmcore.strategies import IntArray


@dataclass(frozen=True, slots=True)
class _Graph:
    """A captured decode step: replaying it fills `logits` from `token_ids`."""

    graph: torch.cuda.CUDAGraph
    key: tuple[int, ...]
    token_ids: torch.Tensor
    logits: torch.Tensor


class Runner:
    """The model, its state and the pipeline on one device.

    Attributes:
        graph_steps, eager_steps: how many steps ran either way.
    """

    def __init__(self, model: Mamba2Model, pipeline: Pipeline, pool: StatePool) -> None:
        self.model = model
        self.pipeline = pipeline
        self.pool = pool
        self.device = pool.device
        self._decode = pipeline.selection.decode
        self._padding = pipeline.selection.graph
        self._graphs: dict[int, _Graph] = {}
        self.graph_steps = self.eager_steps = 0
        self.graph_bytes = 0

    def capture(self, progress: Callable[[int, int], None] | None = None) -> None:
        """Capture a graph for every padded row count; on a CPU there is nothing to capture.

        Args:
            progress: told how many of how many graphs are captured.
        """
        if self.device.type != "cuda":
            return
        self._warm_up()
        sizes = self._padding.sizes
        if not sizes:
            return
        before = torch.cuda.mem_get_info(self.device)[0]
        memory = torch.cuda.graph_pool_handle()
        for done, size in enumerate(reversed(sizes), start=1):
            self._graphs[size] = self._capture(size, memory)
            if progress is not None:
                progress(done, len(sizes))
        self.graph_bytes = max(0, before - torch.cuda.mem_get_info(self.device)[0])

    @torch.inference_mode()
    def _warm_up(self) -> None:
        """Run a step of padding alone, so that kernels are compiled before the first request."""
        plan = self.pipeline.plan_for_capture(1)
        tokens = torch.zeros(plan.num_decode_tokens, dtype=torch.int64, device=self.device)
        self._logits(tokens, plan)

    @torch.inference_mode()
    def _capture(self, size: int, memory: Any) -> _Graph:
        plan = self.pipeline.plan_for_capture(size)
        tokens = torch.zeros(plan.num_decode_tokens, dtype=torch.int64, device=self.device)
        stream = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(stream):
            for _ in range(2):  # kernels are compiled and buffers allocated before the capture
                self._logits(tokens, plan)
        torch.cuda.current_stream(self.device).wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=memory):
            logits = self._logits(tokens, plan)
        return _Graph(graph, plan.key, tokens, logits)

    def _logits(self, tokens: torch.Tensor, plan: StepPlan) -> torch.Tensor:
        hidden = self.model.forward(tokens, plan, self.pool, self._decode)
        return self.model.logits(hidden)

    @torch.inference_mode()
    def run(self, scheduled: Scheduled) -> tuple[StepPlan, torch.Tensor]:
        """Run one step.

        Returns:
            Its plan, and the logits of `scheduled.logit_tokens`: (n, vocab_size), float32.
            They are valid until the next step.
        """
        step = scheduled.step
        token_ids = _token_ids(scheduled)
        padded = self._padding.padded_rows(step.num_rows)
        if padded is not None and padded > step.num_rows and self._only_decodes(step):
            step, token_ids = _pad(step, token_ids, padded)
        plan = self.pipeline.plan(step)
        if not plan.has_prefills:
            graph = self._graphs.get(plan.num_reqs)
            if graph is not None and graph.key == plan.key:
                graph.token_ids[: len(token_ids)].copy_(self._upload(token_ids))
                graph.graph.replay()
                self.graph_steps += 1
                return plan, self._pick(graph.logits, scheduled.logit_tokens)
        self.eager_steps += 1
        hidden = self.model.forward(self._upload(token_ids), plan, self.pool, self._decode)
        return plan, self.model.logits(self._pick(hidden, scheduled.logit_tokens))

    def _only_decodes(self, step: Step) -> bool:
        """Whether a step has no prefills, as the classifier sees it; only such steps are padded."""
        rows = step.rows()
        return self.pipeline.selection.classifier.num_decodes(rows) == step.num_rows

    def _pick(self, values: torch.Tensor, index: IntArray) -> torch.Tensor:
        """Rows of a tensor, without a copy where they are simply the first ones."""
        if len(index) and index[-1] == len(index) - 1:
            return values[: len(index)]
        return values[self._upload(index)]

    def _upload(self, values: IntArray) -> torch.Tensor:
        """A host array on the device; the copy of a pinned array is not waited for."""
        tensor = torch.from_numpy(np.ascontiguousarray(values))
        if self.device.type != "cuda":
            return tensor
        return tensor.pin_memory().to(self.device, non_blocking=True)


def _token_ids(scheduled: Scheduled) -> IntArray:
    """Tokens of all rows, packed in their order."""
    step = scheduled.step
    if any(request.drafts for request in scheduled.requests):
        return _with_drafts(scheduled)
    if len(step.seq_lens) == step.query_start_loc[-1]:
        ends = step.seq_lens.tolist()
        return np.array(
            [one.tokens[end - 1] for one, end in zip(scheduled.requests, ends, strict=True)],
            dtype=np.int64,
        )
    tokens: list[int] = []
    ends, lens = step.seq_lens.tolist(), scheduled.query_lens.tolist()
    for request, end, count in zip(scheduled.requests, ends, lens, strict=True):
        tokens += request.tokens[end - count : end]
    return np.array(tokens, dtype=np.int64)


def _with_drafts(scheduled: Scheduled) -> IntArray:
    tokens: list[int] = []
    ends, lens = scheduled.step.seq_lens.tolist(), scheduled.query_lens.tolist()
    for request, end, count in zip(scheduled.requests, ends, lens, strict=True):
        known = (request.tokens + request.drafts) if request.drafts else request.tokens
        tokens += known[end - count : end]
    return np.array(tokens, dtype=np.int64)


def _pad(step: Step, token_ids: IntArray, rows: int) -> tuple[Step, IntArray]:
    """Append padding rows up to `rows`: no token, null slots."""
    extra = rows - step.num_rows

    def zeros(values: IntArray) -> IntArray:
        return np.concatenate([values, np.zeros(extra, dtype=values.dtype)])

    base = step.decode_base
    padded = Step(
        query_start_loc=np.concatenate(
            [step.query_start_loc, np.full(extra, step.query_start_loc[-1])]
        ),
        seq_lens=zeros(step.seq_lens),
        is_prefilling=np.concatenate([step.is_prefilling, np.zeros(extra, dtype=np.bool_)]),
        block_table=np.concatenate(
            [
                step.block_table,
                np.zeros((extra, step.block_table.shape[1]), dtype=step.block_table.dtype),
            ]
        ),
        decode_base=None if base is None else zeros(base),
        num_accepted_tokens=_extended(step.num_accepted_tokens, extra, 1),
        num_draft_tokens=_extended(step.num_draft_tokens, extra, -1),
    )
    if step.num_accepted_tokens is not None:  # padding rows have no token at all
        return padded, token_ids
    return padded, zeros(token_ids)


def _extended(values: IntArray | None, extra: int, value: int) -> IntArray | None:
    return None if values is None else np.concatenate([values, np.full(extra, value)])
