"""New tokens of a step: sample every row, and let drafts stand as far as they were right."""

from __future__ import annotations

from typing import NamedTuple

import torch

from ssmcore.engine.requests import Request, SamplingParams, TokenLogprob
from ssmcore.engine.sampler import greedy, logprobs_of, sample
from ssmcore.engine.scheduler import Scheduled


class Sampled(NamedTuple):
    """A new token, with its log-probabilities where they were asked for."""

    token: int
    logprob: TokenLogprob | None


def sample_step(scheduled: Scheduled, logits: torch.Tensor) -> list[list[Sampled]]:
    """New tokens of every row that wants some, in the order of `scheduled.sampling`.

    The tokens drawn at a row's drafts are those it would have drawn without drafts; they stand
    as long as each draft is what was drawn in its place. So drafts change no token, greedy or
    sampled.
    """
    rows = [scheduled.requests[at] for at in scheduled.sampling.tolist()]
    if not rows:
        return []
    if all(_is_plain(request) for request in rows):
        return [[Sampled(token, None)] for token in greedy(logits)]
    counts = scheduled.logit_counts.tolist()
    owners = [request for request, count in zip(rows, counts, strict=True) for _ in range(count)]
    positions = [
        len(request.tokens) + nth
        for request, count in zip(rows, counts, strict=True)
        for nth in range(count)
    ]
    params = [request.params for request in owners]
    tokens = sample(logits, params, [request.seed for request in owners], positions)
    logprobs = _logprobs(logits, tokens, params)
    results = []
    start = 0
    for request, count in zip(rows, counts, strict=True):
        drafts = request.drafts if count > 1 else ()
        row = [Sampled(tokens[start], logprobs[start])]
        for nth, draft in enumerate(drafts):
            if draft != tokens[start + nth]:
                break
            row.append(Sampled(tokens[start + nth + 1], logprobs[start + nth + 1]))
        results.append(row)
        start += count
    return results


def _is_plain(request: Request) -> bool:
    """Whether a request takes the most probable token and nothing else is asked of it."""
    params = request.params
    return not request.drafts and params.temperature == 0 and params.logprobs is None


def _logprobs(
    logits: torch.Tensor, tokens: list[int], params: list[SamplingParams]
) -> list[TokenLogprob | None]:
    """Log-probabilities of the rows whose requests asked for them."""
    found: list[TokenLogprob | None] = [None] * len(tokens)
    asked = [at for at, one in enumerate(params) if one.logprobs is not None and tokens[at] >= 0]
    if asked:
        values = logprobs_of(
            logits[torch.tensor(asked, device=logits.device)],
            [tokens[at] for at in asked],
            [params[at].logprobs or 0 for at in asked],
        )
        for at, value in zip(asked, values, strict=True):
            found[at] = value
    return found
