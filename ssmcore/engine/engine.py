"""The engine: requests in, tokens and text out, a step at a time.

It puts the parts together (settings, strategies, model, state pool, scheduler, runner, sampler) and
decides when a request has ended. One thread drives it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from types import TracebackType
from typing import Any

import torch

from ssmcore.device import resolve_device
from ssmcore.engine.drafting import NgramIndex
from ssmcore.engine.memory import choose_num_slots
from ssmcore.engine.outputs import (
    Prompt,
    finished_output,
    paired,
    refused_output,
    stream_event,
)
from ssmcore.engine.requests import (
    FinishReason,
    Request,
    RequestOutput,
    SamplingParams,
    StreamEvent,
)
from ssmcore.engine.runner import Runner
from ssmcore.engine.scheduler import Scheduled, Scheduler
from ssmcore.engine.stats import EngineStats, readable_size
from ssmcore.engine.text import TextStream
from ssmcore.engine.verification import Sampled, sample_step
from ssmcore.errors import CombinationError, RequestError
from ssmcore.models.loading import load_model
from ssmcore.models.mamba2 import Mamba2Model
from ssmcore.models.tokenizer import Tokenizer
from ssmcore.pipeline import Pipeline
from ssmcore.registry import Registry
from ssmcore.selection import select
from ssmcore.settings import Settings
from ssmcore.state import StatePool, bytes_per_slot, slot_tensors
from ssmcore.strategies import IntArray


class Engine:
    """Serves requests with one model on one device.

    Args:
        settings: what to run and how; None reads file and environment (`Settings.load`).
        registry: installed strategies; None loads them.
        model, tokenizer: instead of what `model.path` names.
        progress: told of graph captures at start-up, done and in all.

    Raises:
        SsmcoreError: settings, strategies, model or memory are not to be had; before any request.
    """

    def __init__(
        self,
        settings: Settings | None = None,
        registry: Registry | None = None,
        *,
        model: Mamba2Model | None = None,
        tokenizer: Tokenizer | None = None,
        progress: Callable[[int, int], None] | None = None,
    ) -> None:
        self.settings = settings = Settings.load() if settings is None else settings
        registry = Registry.load() if registry is None else registry
        _check_draft_budget(settings)
        self.device = torch.device(resolve_device(settings.engine.device))
        select(settings, registry)  # faults that need no model are told before one is loaded
        if model is None:
            loaded = load_model(
                settings.model.path,
                device=self.device,
                dtype=settings.model.dtype,
                revision=settings.model.revision,
            )
            model, tokenizer = loaded.model, tokenizer or loaded.tokenizer
        self.model = model
        self.tokenizer = tokenizer
        mixer = model.mixer_shape(settings.cache.state_dtype)
        self.selection = select(
            settings,
            registry,
            running=True,
            device=self.device.type,
            mixer=mixer,
            chunk_size=model.config.chunk_size,
        )
        limits, cache = self.selection.limits, self.selection.cache
        tensors = slot_tensors(mixer, self.selection.decode)
        num_layers = model.config.num_layers
        slot_bytes = bytes_per_slot(tensors, num_layers)
        num_slots = choose_num_slots(settings, cache, limits, slot_bytes, self.device)
        self.pool = StatePool(tensors, num_layers, num_slots, self.device)
        self.observers = registry.observers()
        pipeline = Pipeline(
            self.selection, device=self.device, num_slots=num_slots, observers=self.observers
        )
        self.runner = Runner(model, pipeline, self.pool)
        self.scheduler = Scheduler(cache, limits, num_slots)
        self._requests: dict[str, Request] = {}
        self._ended: list[StreamEvent] = []
        self._arrivals = self._steps = self._scheduled_tokens = self._generated = 0
        self._drafted = self._drafts_accepted = 0
        self.runner.capture(progress)

    # -- requests --------------------------------------------------------------------------------

    def add_request(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        stream: bool = False,
    ) -> str:
        """Queue a request; returns its id.

        Args:
            prompt: text, or token ids.
            params: how to choose tokens; greedy if None.
            request_id: a name of the caller's; drawn if None.
            stream: give events with text as it comes, not only at the end.

        Raises:
            RequestError: the prompt is empty, too long, or holds an unknown token; the id is in
                use.
        """
        params = SamplingParams() if params is None else params
        tokens, text = self._prompt_tokens(prompt)
        number = self._arrivals
        request_id = f"request-{number}" if request_id is None else request_id
        if request_id in self._requests:
            raise RequestError(f"a request with the id {request_id!r} is still running")
        longest = self.settings.engine.max_model_len
        if len(tokens) + 1 > longest:
            raise RequestError(
                f"the prompt has {len(tokens)} tokens; with engine.max_model_len = {longest} it may"
                f" have at most {longest - 1}, so that one can be generated"
            )
        if params.stop and self.tokenizer is None:
            raise RequestError(
                "stop needs text, and this model has no tokenizer; use stop_token_ids instead"
            )
        if (params.logprobs or 0) > self.vocab_size:
            raise RequestError(
                f"logprobs = {params.logprobs} is more than the {self.vocab_size} tokens there are"
            )
        self._arrivals += 1
        most = longest if params.max_tokens is None else len(tokens) + params.max_tokens
        seed = self.settings.engine.seed + number if params.seed is None else params.seed
        request = Request(
            request_id=request_id,
            number=number,
            prompt=text,
            num_prompt_tokens=len(tokens),
            tokens=tokens,
            params=params,
            limit=min(most, longest),
            seed=seed,
            stream=stream,
            arrival=time.perf_counter(),
        )
        if self.selection.limits.num_spec_tokens:
            request.ngrams = NgramIndex(request.tokens)
        if stream or params.stop:
            request.text = self._text_stream(request)
        self._requests[request_id] = request
        self.scheduler.add(request)
        return request_id

    def _prompt_tokens(self, prompt: Prompt) -> tuple[list[int], str | None]:
        if isinstance(prompt, str):
            if self.tokenizer is None:
                raise RequestError("this model has no tokenizer; give the prompt as token ids")
            tokens, text = self.tokenizer.encode(prompt), prompt
        elif isinstance(prompt, Sequence) and not isinstance(prompt, bytes):
            tokens, text = [*prompt], None
        else:
            raise RequestError(f"a prompt is text or token ids, got {type(prompt).__name__}")
        if not tokens:
            raise RequestError("the prompt is empty; it must have at least one token")
        vocab = self.vocab_size
        for at, token in enumerate(tokens):
            if type(token) is not int or not 0 <= token < vocab:
                raise RequestError(
                    f"prompt token {at} is {token!r:.40}; ids are integers from 0 to {vocab - 1}"
                )
        return tokens, text

    def _text_stream(self, request: Request) -> TextStream | None:
        if self.tokenizer is None:
            return None
        prompt = request.tokens[: request.num_prompt_tokens]
        return TextStream(self.tokenizer.incremental_decoder(prompt), request.params.stop)

    def cancel(self, request_id: str) -> bool:
        """End a request now; the next `step` gives its last event. False if it does not run."""
        request = self._requests.get(request_id)
        if request is None:
            return False
        self.scheduler.remove(request)
        self._ended.append(self._end(request, "cancelled"))
        return True

    @property
    def has_work(self) -> bool:
        """Whether `step` has something to do or to tell."""
        return bool(self._requests or self._ended)

    @property
    def vocab_size(self) -> int:
        """Token ids are below this."""
        return self.model.config.vocab_size

    # -- a step ------------------------------------------------------------------------------------

    def step(self) -> list[StreamEvent]:
        """Schedule, run and sample one step; returns what is new.

        Requests that do not stream give one event, at their end. A step that is broken off (out of
        memory, Ctrl-C) leaves every request as it was; what ran is computed again.
        """
        events, self._ended = self._ended, []
        try:
            self._step(events)
        except BaseException:
            self._ended = events + self._ended
            self.scheduler.restart()
            raise
        return events

    def _step(self, events: list[StreamEvent]) -> None:
        scheduled = self.scheduler.schedule()
        if scheduled is None:
            if self.scheduler.waiting and not self.scheduler.running:
                request = self.scheduler.waiting[0]
                self.scheduler.remove(request)
                events.append(self._end(request, "error", "the state pool cannot hold it"))
            return
        begun = time.perf_counter()
        self._poison()
        for request in scheduled.requests:
            if request.first_scheduled is None:
                request.first_scheduled = begun
        plan, logits = self.runner.run(scheduled)
        results = sample_step(scheduled, logits)
        self.scheduler.finish_step(scheduled, plan, self._accepted(scheduled, results))
        now = time.perf_counter()
        self._steps += 1
        self._scheduled_tokens += int(scheduled.step.query_start_loc[-1])
        for at, sampled in zip(scheduled.sampling.tolist(), results, strict=True):
            request = scheduled.requests[at]
            if request.first_token is None:
                request.first_token = now
            event = self._advance(request, sampled)
            if event is not None:
                events.append(event)
        for observer in self.observers:
            observer.step_run(plan, now - begun)

    def _poison(self) -> None:
        """Fill slots that were given up with NaN, where that is asked for."""
        freed = self.scheduler.pool.freed
        if self.settings.engine.poison_freed_slots and freed:
            self.pool.poison(sorted(set(freed)))
        freed.clear()

    def _accepted(self, scheduled: Scheduled, results: list[list[Sampled]]) -> IntArray | None:
        """How many tokens of each row stand, with speculative tokens; None: all of them."""
        if not self.selection.limits.num_spec_tokens:
            return None
        accepted = scheduled.query_lens.copy()
        for at, sampled in zip(scheduled.sampling.tolist(), results, strict=True):
            drafted = int(scheduled.query_lens[at]) - 1
            if scheduled.requests[at].drafts and drafted == len(scheduled.requests[at].drafts):
                accepted[at] = len(sampled)
                self._drafted += drafted
                self._drafts_accepted += len(sampled) - 1
        return accepted

    def _advance(self, request: Request, sampled: list[Sampled]) -> StreamEvent | None:
        """Add new tokens to their request; the event they give rise to, if any."""
        params = request.params
        request.drafts = []
        text = ""
        for token, logprob in sampled:
            if token < 0:
                return self._finish(
                    request, "error", text, "the model's logits are not finite numbers"
                )
            request.tokens.append(token)
            self._generated += 1
            if logprob is not None:
                request.logprobs.append(logprob)
            ends = token in params.stop_token_ids or (
                not params.ignore_eos
                and self.tokenizer is not None
                and token in self.tokenizer.eos_token_ids
            )
            if request.text is not None and not ends:
                text += request.text.push(token)
                ends = request.text.stopped
            if ends:
                return self._finish(request, "stop", text)
            if len(request.tokens) >= request.limit:
                return self._finish(request, "length", text)
        return stream_event(request, text) if request.stream else None

    def _finish(
        self, request: Request, reason: FinishReason, text: str, error: str | None = None
    ) -> StreamEvent:
        self.scheduler.remove(request)
        return self._end(request, reason, error, text)

    def _end(
        self, request: Request, reason: FinishReason, error: str | None = None, text: str = ""
    ) -> StreamEvent:
        """The last event of a request that has left the scheduler."""
        del self._requests[request.request_id]
        generated = request.generated
        if request.text is None:
            request.text = self._text_stream(request)
            if request.text is not None:
                shown = generated[:-1] if reason == "stop" else generated
                text = "".join(map(request.text.push, shown))
        if request.text is not None:
            text += request.text.finish()
        return stream_event(request, text, finished_output(request, reason, error))

    # -- many requests at once -------------------------------------------------------------------

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> list[RequestOutput]:
        """Run prompts to their end; outputs in the order of the prompts.

        A prompt that is refused gives an output with `finish_reason` "error"; the others run.
        Events of requests that were added before wait for the next `step`. Breaking off (Ctrl-C)
        cancels these requests and no others.

        Raises:
            RequestError: as many parameters as prompts are needed, or one for all.
        """
        outputs: dict[int, RequestOutput] = {}
        number_of: dict[str, int] = {}
        for number, (prompt, one) in enumerate(paired(prompts, params)):
            try:
                number_of[self.add_request(prompt, one)] = number
            except RequestError as error:
                outputs[number] = refused_output(f"refused-{number}", prompt, str(error))
        left = set(number_of)
        try:
            while left:
                for event in self._step_for(left):
                    if event.output is not None:
                        outputs[number_of[event.request_id]] = event.output
                        left.discard(event.request_id)
        finally:
            self._drop(left)
        return [outputs[number] for number in sorted(outputs)]

    def stream(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> Iterator[StreamEvent]:
        """Run prompts and give events as they come; a request's last one has its output.

        Leaving the loop early cancels what still runs.

        Raises:
            RequestError: a prompt or its parameters are refused; nothing was started.
        """
        left: set[str] = set()
        try:
            for prompt, one in paired(prompts, params):
                left.add(self.add_request(prompt, one, stream=True))
            while left:
                for event in self._step_for(left):
                    if event.output is not None:
                        left.discard(event.request_id)
                    yield event
        finally:
            self._drop(left)

    def _step_for(self, own: set[str]) -> list[StreamEvent]:
        """A step; events of requests other than `own` are kept for the next one."""
        events = self.step()
        self._ended += [event for event in events if event.request_id not in own]
        return [event for event in events if event.request_id in own]

    def _drop(self, request_ids: set[str]) -> None:
        """Cancel requests whose end nobody waits for any more."""
        for request_id in request_ids:
            self.cancel(request_id)
        self._ended = [event for event in self._ended if event.request_id not in request_ids]

    # -- what is going on --------------------------------------------------------------------------

    def stats(self) -> EngineStats:
        """Counts of requests, slots, steps and tokens."""
        scheduler, pool = self.scheduler, self.scheduler.pool
        return EngineStats(
            running=len(scheduler.running),
            waiting=len(scheduler.waiting),
            total_slots=pool.num_usable,
            used_slots=pool.num_used,
            free_slots=pool.num_free,
            cached_slots=pool.num_cached,
            steps=self._steps,
            graph_steps=self.runner.graph_steps,
            scheduled_tokens=self._scheduled_tokens,
            generated_tokens=self._generated,
            prefix_queries=scheduler.prefix_queries,
            prefix_hits=scheduler.prefix_hits,
            cached_tokens=scheduler.cached_tokens,
            preemptions=scheduler.preemptions,
            evictions=pool.evictions,
            drafted_tokens=self._drafted,
            accepted_drafts=self._drafts_accepted,
        )

    @property
    def title(self) -> str:
        """Model and strategies in a few words."""
        names = self.selection.names
        return (
            f"{self.settings.model.path}: {names['decode']}, cache {names['cache']},"
            f" graph {names['graph']}"
        )

    def describe(self) -> list[str]:
        """What runs, a line each: model, strategies and notes about them, memory."""
        config, pool = self.model.config, self.pool
        names = ", ".join(f"{slot} {name}" for slot, name in self.selection.names.items())
        lines = [
            f"model {self.settings.model.path}: {config.num_layers} layers, d_model"
            f" {config.d_model}, {self.model.dtype} on {self.device}".replace("torch.", ""),
            f"strategies: {names}",
            *self.selection.notes,
            f"state pool: {pool.num_slots - 1} slots of {readable_size(pool.bytes_per_slot)},"
            f" {readable_size(pool.nbytes)}, states in {self.settings.cache.state_dtype}",
        ]
        if self.runner.graph_bytes:
            sizes = self.selection.graph.sizes
            lines.append(f"{len(sizes)} graphs captured, {readable_size(self.runner.graph_bytes)}")
        return lines

    def facts(self) -> dict[str, Any]:
        """What runs, as JSON values, for records of measurements."""
        return {
            "model": self.settings.model.path,
            "dtype": str(self.model.dtype).removeprefix("torch."),
            "device": str(self.device),
            "strategies": dict(self.selection.names),
            "limits": asdict(self.selection.limits),
            "slots": self.pool.num_slots - 1,
            "slot_bytes": self.pool.bytes_per_slot,
        }

    def close(self) -> None:
        """Cancel what runs."""
        for request_id in list(self._requests):
            self.cancel(request_id)
        self._ended.clear()

    def __enter__(self) -> Engine:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def _check_draft_budget(settings: Settings) -> None:
    """Refuse a token budget that one decoding row and its drafts would not fit in."""
    drafts, budget = settings.engine.num_spec_tokens, settings.engine.max_num_batched_tokens
    if drafts and budget < 1 + drafts:
        raise CombinationError(
            f"engine.num_spec_tokens = {drafts} cannot go with engine.max_num_batched_tokens ="
            f" {budget}: a row takes {1 + drafts} tokens a step; what works: a budget of at least"
            f" {1 + drafts}"
        )
