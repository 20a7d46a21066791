"""The float64 forward of a token sequence: what log-probabilities of chosen tokens should be.

One prefill per sequence through the model's own layers in float64, from no state at all; the
kernels below have oracles of their own. Nothing is cached, padded or replayed.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from ssmcore.models.loading import load_model
from ssmcore.pipeline import Pipeline
from ssmcore.registry import Registry
from ssmcore.selection import STATIC_DECODE, select
from ssmcore.settings import Settings
from ssmcore.state import StatePool, slot_tensors
from ssmcore.step import Step

Tokens = tuple[int, ...]


class Oracle:
    """A model in float64 on one device.

    Args:
        path: as `model.path`.
        registry: for the plan's strategies: no cache, no graphs, the plain recurrence.
        device: where it runs.
    """

    def __init__(self, path: str, registry: Registry, device: torch.device) -> None:
        self._model = load_model(path, device=device, dtype="float64").model
        self._registry = registry
        self._device = device
        self._known: dict[tuple[Tokens, Tokens], torch.Tensor] = {}

    def logprobs(self, requests: Sequence[tuple[Tokens, Tokens]]) -> list[torch.Tensor]:
        """Log-probabilities of generated tokens, (generated,) float64 on the CPU each.

        Args:
            requests: prompt and generated tokens of each.
        """
        new = [one for one in dict.fromkeys(requests) if one not in self._known]
        if new:
            self._known.update(zip(new, self._forward(new), strict=True))
        return [self._known[one] for one in requests]

    def margin(self, requests: Sequence[tuple[Tokens, Tokens]]) -> float:
        """Least distance of a generated token's log-probability to the best other token's.

        Negative if a generated token is not the most probable one.
        """
        least = float("inf")
        for scores, (_, generated) in zip(self._scores(requests), requests, strict=True):
            chosen = torch.tensor(generated)[:, None]
            of_chosen = scores.gather(1, chosen)
            others = scores.scatter(1, chosen, float("-inf")).amax(1, keepdim=True)
            least = min(least, float((of_chosen - others).min()))
        return least

    def _forward(self, requests: Sequence[tuple[Tokens, Tokens]]) -> list[torch.Tensor]:
        return [
            scores.gather(1, torch.tensor(generated)[:, None])[:, 0]
            for scores, (_, generated) in zip(self._scores(requests), requests, strict=True)
        ]

    @torch.inference_mode()
    def _scores(self, requests: Sequence[tuple[Tokens, Tokens]]) -> list[torch.Tensor]:
        """Log-probabilities of every token where each generated one stands, (generated, vocab)."""
        inputs = [prompt + generated[:-1] for prompt, generated in requests]
        lengths = [len(tokens) for tokens in inputs]
        settings = Settings.from_dict(
            {
                "decode": {"name": STATIC_DECODE},
                "engine": {
                    "max_num_seqs": len(inputs),
                    "max_num_batched_tokens": sum(lengths),
                    "max_model_len": max(lengths),
                },
            }
        )
        selection = select(settings, self._registry, chunk_size=self._model.config.chunk_size)
        tensors = slot_tensors(self._model.mixer_shape("float64"), selection.decode)
        slots = len(inputs) + 1
        pool = StatePool(tensors, self._model.config.num_layers, slots, self._device)
        pipeline = Pipeline(selection, device=self._device, num_slots=slots)
        plan = pipeline.plan(
            Step.of(
                query_start_loc=np.concatenate([[0], np.cumsum(lengths)]),
                seq_lens=lengths,
                is_prefilling=[True] * len(inputs),
                block_table=[[slot] for slot in range(1, slots)],
            )
        )
        packed = torch.tensor([token for tokens in inputs for token in tokens])
        hidden = self._model.forward(packed.to(self._device), plan, pool, selection.decode)
        ends = np.cumsum(lengths)
        return [
            torch.nn.functional.linear(hidden[end - len(generated) : end], self._model.weights.head)
            .log_softmax(-1)
            .cpu()
            for end, (_, generated) in zip(ends.tolist(), requests, strict=True)
        ]
