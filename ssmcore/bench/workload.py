"""From a trace to requests the model can take: lengths capped, prompts made up.

A trace has no text. A prompt's tokens are a seeded function of the trace's hash ids where it has
them, so equal prefixes stay equal prefixes, and of the request's place in the trace otherwise.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from ssmcore.errors import SettingsError
from ssmcore.traces import BLOCK_TOKENS, Trace, TraceRequest, without_empty

_KEPT_BLOCKS = 4096


@dataclass(frozen=True, slots=True)
class Item:
    """One request to send: seconds after the first one, and the lengths after capping."""

    request: TraceRequest
    arrival: float
    prompt_tokens: int
    output_tokens: int


@dataclass(frozen=True, slots=True)
class Workload:
    """Requests to send, in order of arrival.

    Attributes:
        max_prompt, max_output: what lengths were capped to, besides `max_model_len`.
        prompts_capped, outputs_capped: how many requests were.
        left_out: requests of the trace without a prompt or an output token.
    """

    trace: Trace
    items: tuple[Item, ...]
    max_model_len: int
    max_prompt: int | None
    max_output: int | None
    prompts_capped: int
    outputs_capped: int
    left_out: int


def make_workload(
    trace: Trace,
    *,
    max_model_len: int,
    max_prompt: int | None = None,
    max_output: int | None = None,
) -> Workload:
    """Cap a trace's lengths so that prompt and output together fit in `max_model_len` tokens.

    The output is capped first and the prompt takes what is left, so a long prompt loses its end.

    Raises:
        SettingsError: a cap below 1, a `max_model_len` below 2, or no request left to send.
    """
    for name, cap, least in (
        ("--max-prompt", max_prompt, 1),
        ("--max-output", max_output, 1),
        ("engine.max_model_len", max_model_len, 2),
    ):
        if cap is not None and cap < least:
            raise SettingsError(f"{name} = {cap}; it must be at least {least}")
    kept, left_out = without_empty(trace)
    if not kept.requests:
        raise SettingsError(f"{trace.name} has no request with prompt and output tokens")
    most_output = min(max_output or max_model_len, max_model_len - 1)
    start = kept.requests[0].arrival
    items = []
    for request in kept.requests:
        output = min(request.output_tokens, most_output)
        prompt = min(request.prompt_tokens, max_prompt or max_model_len, max_model_len - output)
        items.append(Item(request, request.arrival - start, prompt, output))
    return Workload(
        trace=trace,
        items=tuple(items),
        max_model_len=max_model_len,
        max_prompt=max_prompt,
        max_output=max_output,
        prompts_capped=sum(item.prompt_tokens < item.request.prompt_tokens for item in items),
        outputs_capped=sum(item.output_tokens < item.request.output_tokens for item in items),
        left_out=left_out,
    )


class PromptMaker:
    """Makes the prompts of a workload.

    Args:
        vocab_size: tokens are drawn from `0..vocab_size - 1`.
        seed: other seeds give other prompts with the same sharing.
    """

    def __init__(self, vocab_size: int, seed: int = 0) -> None:
        self.vocab_size = vocab_size
        self.seed = seed
        self._block = lru_cache(_KEPT_BLOCKS)(self._make_block)

    def tokens(self, item: Item) -> list[int]:
        """The prompt of one request: `item.prompt_tokens` token ids."""
        hash_ids = item.request.hash_ids
        if hash_ids is None:
            return self._draw((1, item.request.index), item.prompt_tokens)
        return [token for block in self._blocks(hash_ids) for token in block][: item.prompt_tokens]

    def _blocks(self, hash_ids: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
        for hash_id in hash_ids:
            yield self._block(hash_id)

    def _make_block(self, hash_id: int) -> tuple[int, ...]:
        return tuple(self._draw((2, hash_id), BLOCK_TOKENS))

    def _draw(self, source: tuple[int, int], count: int) -> list[int]:
        generator = np.random.default_rng([self.seed, *source])
        tokens: list[int] = generator.integers(self.vocab_size, size=count).tolist()
        return tokens
