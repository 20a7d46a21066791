"""What is asked of the engine and what it answers: parameters, requests, events, outputs.

Plain data. Parameters are checked when they are made; what depends on the model or on other
requests is checked by the engine.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from ssmcore.errors import RequestError

if TYPE_CHECKING:
    from ssmcore.engine.drafting import NgramIndex
    from ssmcore.engine.text import TextStream

FinishReason = Literal["stop", "length", "cancelled", "error"]

LOWEST_TEMPERATURE = 1e-5
MAX_LOGPROBS = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How one request's tokens are chosen, and when it ends.

    The order is: temperature, then `top_k`, then `top_p` over what `top_k` left, then `min_p`. Log-
    probabilities are those of the model, before any of these.

    Attributes:
        max_tokens: most tokens to generate; None: until `engine.max_model_len` is full.
        temperature: 0 takes the most probable token; larger is more varied.
        top_k: sample from the k most probable tokens; 0: from all.
        top_p: sample from the fewest tokens whose probabilities reach `top_p`; 1: from all.
        min_p: leave out tokens less probable than `min_p` times the most probable one; 0: none.
        seed: 0 to 2**64 - 1; same seed, same tokens, whatever else runs. None: one is drawn and
            reported in the output.
        stop: texts that end the output; the output stops before them.
        stop_token_ids: tokens that end the output; the last token id, but not part of the text.
        ignore_eos: generate on after the model's end-of-sequence token.
        logprobs: None: no log-probabilities; n: those of each chosen token and of the n most
            probable ones.

    Raises:
        RequestError: a value of the wrong type or out of range; names the parameter.
    """

    max_tokens: int | None = 128
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    stop: Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    logprobs: int | None = None

    def __post_init__(self) -> None:
        if self.max_tokens is not None:
            _integer("max_tokens", self.max_tokens, 1, None)
        temperature = _number("temperature", self.temperature, 0, None)
        if 0 < temperature < LOWEST_TEMPERATURE:
            raise RequestError(
                f"temperature = {temperature!r} is too small to divide by; use 0 for the most"
                f" probable token, or at least {LOWEST_TEMPERATURE}"
            )
        _integer("top_k", self.top_k, 0, None)
        if not _number("top_p", self.top_p, 0, 1) > 0:
            raise RequestError(
                f"top_p = {self.top_p!r} leaves no token; it must be above 0, up to 1"
            )
        _number("min_p", self.min_p, 0, 1)
        if self.seed is not None:
            _integer("seed", self.seed, 0, 2**64 - 1)
        if self.logprobs is not None:
            _integer("logprobs", self.logprobs, 0, MAX_LOGPROBS)
        if not isinstance(self.ignore_eos, bool):
            raise RequestError(f"ignore_eos must be true or false, got {self.ignore_eos!r:.60}")
        stop = (self.stop,) if isinstance(self.stop, str) else self.stop
        object.__setattr__(self, "stop", _all_of("stop", stop, str, "texts"))
        tokens = _all_of("stop_token_ids", self.stop_token_ids, int, "token ids")
        object.__setattr__(self, "stop_token_ids", tokens)
        if "" in self.stop:
            raise RequestError("stop holds an empty text, which every output starts with")


def _integer(name: str, value: object, least: int, most: int | None) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise RequestError(f"{name} must be an integer, got {value!r:.60}")
    _in_range(name, value, least, most)
    return value


def _number(name: str, value: object, least: float, most: float | None) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise RequestError(f"{name} must be a number, got {value!r:.60}")
    if not math.isfinite(value):
        raise RequestError(f"{name} must be finite, got {value!r}")
    _in_range(name, value, least, most)
    return value


def _in_range(name: str, value: float, least: float, most: float | None) -> None:
    if value < least or (most is not None and value > most):
        wanted = f"at least {least}" if most is None else f"{least} to {most}"
        raise RequestError(f"{name} = {value} is out of range; it must be {wanted}")


def _all_of(name: str, values: object, kind: type, what: str) -> tuple[Any, ...]:
    if isinstance(values, str) or not isinstance(values, Sequence | set | frozenset):
        raise RequestError(f"{name} must be a list of {what}, got {values!r:.60}")
    for value in values:
        if isinstance(value, bool) or not isinstance(value, kind):
            raise RequestError(f"{name} must hold {what}, got {value!r:.60}")
    return tuple(values)


class TokenLogprob(NamedTuple):
    """Log-probability (natural) of a chosen token, and of the most probable ones, best first."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...]


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens of a request; `cached_tokens` of the prompt were found in the prefix cache."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int


@dataclass(frozen=True, slots=True)
class Timing:
    """When things happened, in seconds of `time.perf_counter`; None where they did not."""

    arrival: float
    first_scheduled: float | None
    first_token: float | None
    finished: float | None


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """A finished request.

    Attributes:
        prompt: the text it was asked with, None where token ids were given.
        text: what was generated, without the stop text or stop token that ended it.
        token_ids: the tokens generated, a stop token included.
        logprobs: one entry a token, where asked for.
        finish_reason: "stop" (stop text, stop token or end of sequence), "length", "cancelled" or
            "error"; then `error` says why.
        seed: the seed its random numbers came from.
        preemptions: how often it had to make room and was computed again.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: tuple[int, ...]
    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    usage: Usage
    timing: Timing
    logprobs: tuple[TokenLogprob, ...] | None = None
    seed: int | None = None
    preemptions: int = 0
    error: str | None = None


@dataclass(frozen=True, slots=True)
class StreamEvent:
    """News of one request: what a step added to it, and on the last event the whole output.

    Attributes:
        text: new text; it may lag behind `token_ids` while a character is incomplete or a stop text
            may have begun.
        token_ids, logprobs: new since the request's last event.
        output: the finished request; None on all but the last event.
    """

    request_id: str
    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...] | None = None
    output: RequestOutput | None = None

    @property
    def finish_reason(self) -> FinishReason | None:
        """Why the request ended, None while it runs."""
        return None if self.output is None else self.output.finish_reason


@dataclass(slots=True, eq=False)
class Request:
    """One request's state, from arrival to end.

    Attributes:
        number: order of arrival, what first come first served and preemption go by.
        tokens: prompt and what was generated so far; all but the last are computed once it decodes.
        limit: most tokens, prompt included.
        row: its row among the running requests, -1 while it waits or when it has ended.
        hashes: prefix hashes of its tokens at the cache's boundaries, as far as they were needed.
        text: makes text of its tokens, where text is wanted before the end.
        drafts: tokens that this step guesses to follow.
        ngrams: where they are looked up, with speculative tokens.
    """

    request_id: str
    number: int
    prompt: str | None
    num_prompt_tokens: int
    tokens: list[int]
    params: SamplingParams
    limit: int
    seed: int
    stream: bool
    arrival: float
    text: TextStream | None = None
    row: int = -1
    drafts: list[int] = field(default_factory=list)
    ngrams: NgramIndex | None = None
    hashes: list[bytes] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    reported: int = 0
    cached_tokens: int = 0
    preemptions: int = 0
    first_scheduled: float | None = None
    first_token: float | None = None

    @property
    def generated(self) -> list[int]:
        """Tokens generated so far."""
        return self.tokens[self.num_prompt_tokens :]

    @property
    def needs_attention(self) -> bool:
        """Whether every new token must be looked at, rather than only the last one."""
        params = self.params
        return (
            self.stream or bool(params.stop or params.stop_token_ids) or params.logprobs is not None
        )
