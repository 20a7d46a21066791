"""From logits to tokens: greedy, or from the filtered distribution with one number per token.

The number is a hash of the request's seed and the token's position, so a request's tokens depend on
nothing else in the batch. Filters apply in the order temperature, top-k, top-p, min-p.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from ssmcore.engine.requests import SamplingParams, TokenLogprob

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def uniforms(seeds: Sequence[int], positions: Sequence[int]) -> npt.NDArray[np.float64]:
    """A number in [0, 1) for each seed and position, by two rounds of splitmix64.

    Source: Steele, Lea and Flood, "Fast splittable pseudorandom number generators", 2014.
    """
    with np.errstate(over="ignore"):
        state = np.array([seed % 2**64 for seed in seeds], dtype=np.uint64)
        state = _mix(state + _GOLDEN)
        state = _mix(state + (np.array(positions, dtype=np.uint64) + np.uint64(1)) * _GOLDEN)
    return (state >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _mix(value: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    value = (value ^ (value >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    value = (value ^ (value >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return value ^ (value >> np.uint64(31))


def sample(
    logits: torch.Tensor,
    params: Sequence[SamplingParams],
    seeds: Sequence[int],
    positions: Sequence[int],
) -> list[int]:
    """One token a row; -1 where the logits are not numbers and there is nothing to choose.

    Args:
        logits: (rows, vocab_size), float32.
        params, seeds: of each row's request.
        positions: sequence position of each token that is drawn.
    """
    tokens = _most_probable(logits)
    drawn = [row for row, one in enumerate(params) if one.temperature > 0]
    if drawn:
        numbers = uniforms([seeds[row] for row in drawn], [positions[row] for row in drawn])
        every = len(drawn) == len(params)
        index = torch.tensor(drawn, device=logits.device)
        chosen = _draw(logits if every else logits[index], [params[row] for row in drawn], numbers)
        tokens[index] = torch.where(tokens[index] < 0, -1, chosen)
    return [int(token) for token in tokens.tolist()]


def greedy(logits: torch.Tensor) -> list[int]:
    """The most probable token of every row; -1 where the logits are not numbers."""
    return [int(token) for token in _most_probable(logits).tolist()]


def _most_probable(logits: torch.Tensor) -> torch.Tensor:
    best, tokens = logits.max(dim=-1)
    return torch.where(best.isfinite(), tokens, -1)


def _draw(
    logits: torch.Tensor, params: Sequence[SamplingParams], numbers: npt.NDArray[np.float64]
) -> torch.Tensor:
    """Inverse of the cumulated filtered distribution, most probable token first."""

    def column(values: list[float]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.float64, device=logits.device)[:, None]

    vocab = logits.shape[-1]
    ordered, token_ids = torch.sort(logits.double(), dim=-1, descending=True, stable=True)
    scaled = (ordered - ordered[:, :1]) / column([one.temperature for one in params])
    rank = torch.arange(vocab, device=logits.device)
    most = column([float(one.top_k or vocab) for one in params])
    weight = torch.where(rank < most, torch.exp(scaled), 0.0)
    before = torch.cumsum(weight, dim=-1) - weight
    reach = column([one.top_p for one in params]) * weight.sum(dim=-1, keepdim=True)
    keep = (before < reach) & (weight >= column([one.min_p for one in params]) * weight[:, :1])
    keep[:, 0] = True
    weight = torch.where(keep, weight, 0.0)
    total = torch.cumsum(weight, dim=-1)
    wanted = column(numbers.tolist()) * total[:, -1:]
    at = torch.searchsorted(total, wanted, right=True)
    last = keep.to(torch.int64).sum(dim=-1, keepdim=True) - 1
    return token_ids.gather(1, torch.minimum(at, last))[:, 0]


def logprobs_of(
    logits: torch.Tensor, tokens: Sequence[int], counts: Sequence[int]
) -> list[TokenLogprob]:
    """Log-probabilities of the chosen tokens and of the `counts[row]` most probable ones.

    logits: (rows, vocab_size), float32, before any filter.
    """
    scores = torch.log_softmax(logits.double(), dim=-1)
    index = torch.tensor(list(tokens), device=logits.device)
    chosen = scores.gather(1, index[:, None])[:, 0].tolist()
    most = min(max(counts), logits.shape[-1])
    top = torch.topk(scores, most, dim=-1)
    values, ids = top.values.tolist(), top.indices.tolist()
    return [
        TokenLogprob(
            token,
            chosen[row],
            tuple(zip(ids[row][: counts[row]], values[row][: counts[row]], strict=True)),
        )
        for row, token in enumerate(tokens)
    ]
