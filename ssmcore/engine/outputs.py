"""What a caller hands in and gets back: prompts with parameters, events, outputs."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from ssmcore.engine.requests import (
    FinishReason,
    Request,
    RequestOutput,
    SamplingParams,
    StreamEvent,
    Timing,
    Usage,
)
from ssmcore.errors import RequestError

Prompt = str | Sequence[int]


def paired(
    prompts: Prompt | Sequence[Prompt],
    params: SamplingParams | Sequence[SamplingParams] | None,
) -> list[tuple[Prompt, SamplingParams | None]]:
    """Each prompt with its parameters; one prompt or one set of parameters stands for all.

    Raises:
        RequestError: several parameters, but not one for each prompt.
    """
    several: list[Any] = [prompts] if isinstance(prompts, str) else list(prompts)
    if several and isinstance(several[0], int):
        several = [several]
    if params is None or isinstance(params, SamplingParams):
        return [(prompt, params) for prompt in several]
    if len(params) != len(several):
        raise RequestError(
            f"{len(several)} prompts and {len(params)} parameters; give one for each"
        )
    return list(zip(several, params, strict=True))


def stream_event(request: Request, text: str, output: RequestOutput | None = None) -> StreamEvent:
    """What is new since the request's last event."""
    start = request.reported
    new = tuple(request.tokens[request.num_prompt_tokens + start :])
    request.reported = start + len(new)
    logprobs = tuple(request.logprobs[start:]) if request.params.logprobs is not None else None
    return StreamEvent(request.request_id, text, new, logprobs, output)


def finished_output(request: Request, reason: FinishReason, error: str | None) -> RequestOutput:
    """The output of a request that has ended now."""
    generated = request.generated
    return RequestOutput(
        request_id=request.request_id,
        prompt=request.prompt,
        prompt_token_ids=tuple(request.tokens[: request.num_prompt_tokens]),
        text=request.text.text if request.text is not None else "",
        token_ids=tuple(generated),
        finish_reason=reason,
        usage=Usage(request.num_prompt_tokens, len(generated), request.cached_tokens),
        timing=Timing(
            request.arrival, request.first_scheduled, request.first_token, time.perf_counter()
        ),
        logprobs=tuple(request.logprobs) if request.params.logprobs is not None else None,
        seed=request.seed,
        preemptions=request.preemptions,
        error=error,
    )


def refused_output(request_id: str, prompt: Prompt, error: str) -> RequestOutput:
    """The output of a prompt that was never run."""
    now = time.perf_counter()
    return RequestOutput(
        request_id=request_id,
        prompt=prompt if isinstance(prompt, str) else None,
        prompt_token_ids=(),
        text="",
        token_ids=(),
        finish_reason="error",
        usage=Usage(0, 0, 0),
        timing=Timing(now, None, None, now),
        error=error,
    )
