"""Runs cases of the matrix on the bundled model and compares tokens and log-probabilities.

What a case is, and which cannot be, is `ssmcore.testing.matrix`' business. The tokens to compare
with come from the plain recurrence without cache and graphs on the same device.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch

from ssmcore.device import resolve_device
from ssmcore.engine.engine import Engine
from ssmcore.engine.memory import slots_of_one_request
from ssmcore.engine.requests import RequestOutput, SamplingParams
from ssmcore.engine.stats import EngineStats
from ssmcore.errors import SsmcoreError
from ssmcore.models.loading import LoadedModel, load_model
from ssmcore.registry import Registry
from ssmcore.selection import STATIC_DECODE
from ssmcore.settings import Settings
from ssmcore.state import bytes_per_slot, slot_tensors
from ssmcore.strategies import Selection
from ssmcore.testing.matrix import MAX_MODEL_LEN, Case, Matrix
from ssmcore.testing.oracle import Oracle, Tokens

MODEL = "quickstart"
NEW_TOKENS = 256
"""Least tokens that every request generates."""
LONG_PROMPT, FIRST_TURN = 200, 90
"""Tokens of the longest first prompt, and of its answer that the second turn goes on from."""

AMPLE = "256 MiB"
"""Of the state pool: room for all requests and a good many cached states."""

LOGPROB_BOUNDS = {"float32": 1e-4, "float16": 2e-2, "bfloat16": 2.5e-1}
"""By state dtype: greatest error of a chosen token's log-probability against float64."""
ACTIVATION_BOUNDS = {"float32": 0.0, "bfloat16": 2.5e-1}
"""By dtype of activations: what comes on top."""

TEXT = '''"""Read a table of measurements and print the mean of every column."""

import argparse
import csv
from pathlib import Path


class Column:
    def __init__(self, name):
        self.name = name
        self.values = []

    def add(self, text):
        if text.strip():
            self.values.append(float(text))

    @property
    def mean(self):
        return sum(self.values) / len(self.values) if self.values else None


def read_table(path):
    with Path(path).open(newline="") as file:
        rows = csv.reader(file)
        columns = [Column(name) for name in next(rows)]
        for row in rows:
            for column, text in zip(columns, row):
                column.add(text)
    return columns


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("path")
    for column in read_table(parser.parse_args().path):
        print(column.name, column.mean)
'''


class Prompt(NamedTuple):
    """A request of the matrix: its prompt, how many tokens it generates, which they should be."""

    tokens: Tokens
    max_tokens: int
    expected: Tokens


@dataclass(frozen=True, slots=True)
class Outcome:
    """What running one case gave.

    Attributes:
        tokens: compared; differing: those that are not the reference's.
        first_difference: the first of them, as request and position.
        logprob_error: greatest error of a chosen token's log-probability against float64.
        logprob_bound: what it must stay under.
        tokens_must_match: whether a differing token is a fault (float32 state, exact algorithm).
    """

    tokens: int
    differing: int
    first_difference: tuple[int, int] | None
    logprob_error: float
    logprob_bound: float
    tokens_must_match: bool
    preemptions: int
    prefix_hits: int
    cached_tokens: int
    graph_steps: int
    steps: int
    accepted_drafts: int
    seconds: float

    @property
    def result(self) -> str:
        """`same`, `bounded` (tokens may differ, errors are small) or `wrong`."""
        if self.tokens_must_match and self.differing:
            return "wrong"
        if not self.logprob_error <= self.logprob_bound:  # NaN is wrong too
            return "wrong"
        return "same" if self.tokens_must_match else "bounded"

    def as_dict(self) -> dict[str, Any]:
        """JSON values."""
        return {"result": self.result, **asdict(self)}


class Workbench:
    """The bundled model on one device, shared by all cases, and what to compare with.

    Args:
        device: as `engine.device`.

    Raises:
        UnavailableError: there is no such device.
    """

    def __init__(self, device: str = "cpu") -> None:
        self.device = resolve_device(device)
        self.registry = Registry.load()
        torch.backends.cuda.matmul.allow_tf32 = False
        torch.backends.cudnn.allow_tf32 = False
        self._models: dict[str, LoadedModel] = {}
        self.model, self.tokenizer = self.loaded("float32")
        self.chunk_size = self.model.config.chunk_size
        self.matrix = Matrix(
            self.registry,
            torch.device(self.device).type,
            self.model.mixer_shape(),
            self.chunk_size,
        )

    def loaded(self, dtype: str) -> LoadedModel:
        """The model in one dtype of weights and activations, and its tokenizer."""
        if dtype not in self._models:
            self._models[dtype] = load_model(MODEL, device=self.device, dtype=dtype)
        return self._models[dtype]

    @cached_property
    def oracle(self) -> Oracle:
        """The same model in float64."""
        return Oracle(MODEL, self.registry, torch.device(self.device))

    @cached_property
    def prompts(self) -> list[Prompt]:
        """Requests of every case, the longest first, with the reference's tokens.

        The first goes on from the second's answer. Ends are staggered, so that steps have every
        row count.
        """
        text = self.tokenizer.encode(TEXT)
        chunk = self.chunk_size
        lengths = (LONG_PROMPT, chunk + 1, chunk, chunk - 1, 1)
        starts = [111 * nth for nth in range(len(lengths))]
        tokens = [
            tuple(text[start : start + length])
            for start, length in zip(starts, lengths, strict=True)
        ]
        (answer,) = self.reference(tokens[:1], [FIRST_TURN])
        tokens.insert(0, tokens[0] + answer)
        counts = [NEW_TOKENS + 2 * nth for nth in range(len(tokens))]
        expected = self.reference(tokens, counts)
        return [Prompt(*one) for one in zip(tokens, counts, expected, strict=True)]

    def reference(self, prompts: Sequence[Tokens], counts: Sequence[int]) -> list[Tokens]:
        """Greedy tokens by the plain recurrence, without cache and graphs."""
        settings = Settings.from_dict(
            {
                "model": {"dtype": "float32"},
                "decode": {"name": STATIC_DECODE},
                "engine": {"device": self.device, "max_model_len": MAX_MODEL_LEN},
            }
        )
        with self.engine(settings) as engine:
            return [output.token_ids for output in greedy(engine, prompts, counts)]

    def engine(self, settings: Settings) -> Engine:
        """An engine on the shared model of `model.dtype`."""
        model, tokenizer = self.loaded(settings.model.dtype)
        return Engine(settings, self.registry, model=model, tokenizer=tokenizer)

    def error_of(self, case: Case) -> SsmcoreError | None:
        """What the engine says to a case at start-up, None if it takes it."""
        try:
            self.engine(case.settings(self.device)).close()
        except SsmcoreError as error:
            return error
        return None

    def run(self, case: Case) -> Outcome:
        """Run a case that no strategy refuses.

        Raises:
            AssertionError: a request failed, or slots were left behind.
        """
        begun = time.perf_counter()
        selection = self.matrix.selection(case)
        requests = self.prompts
        memory = AMPLE
        if case.pool == "tight":
            slots = self._tight(selection)
            extra = max(0, slots // (1 + case.drafts) + 1 - len(requests))
            requests = requests + [requests[-1 - nth % len(requests)] for nth in range(extra)]
            memory = f"{(slots + 1) * self._slot_bytes(selection)} B"
        outputs: list[RequestOutput] = []
        wanted: list[Prompt] = []
        with self.engine(case.settings(self.device, memory)) as engine:
            if case.prefix == "shared":
                for earlier in self._earlier():
                    wanted.append(earlier)
                    outputs += greedy(engine, [earlier.tokens], [earlier.max_tokens])
            wanted += requests
            outputs += greedy(
                engine, [one.tokens for one in requests], [one.max_tokens for one in requests]
            )
            stats = engine.stats()
        assert_idle(stats)
        return self._outcome(case, selection, wanted, outputs, stats, time.perf_counter() - begun)

    def _earlier(self) -> list[Prompt]:
        """What runs before with a shared prefix: the first turn, then the second's beginning."""
        second, first = self.prompts[:2]
        return [
            Prompt(first.tokens, FIRST_TURN + 6, first.expected[: FIRST_TURN + 6]),
            Prompt(second.tokens, 2, second.expected[:2]),
        ]

    def _tight(self, selection: Selection) -> int:
        """Slots for one request fewer than there are, when none passes from block to block.

        A request that decodes holds `1 + S` slots, and for as long as it passes, one more.
        """
        drafts = selection.limits.num_spec_tokens
        least = slots_of_one_request(selection.cache, selection.limits)
        return max(least, (len(self.prompts) - 1) * (1 + drafts))

    def _slot_bytes(self, selection: Selection) -> int:
        assert selection.mixer is not None
        tensors = slot_tensors(selection.mixer, selection.decode)
        return bytes_per_slot(tensors, self.model.config.num_layers)

    def can_hit(self, case: Case) -> bool:
        """Whether requests of a case can start from states that earlier ones left."""
        cache = self.matrix.selection(case).cache
        longest = len(self.prompts[0].tokens) - (2 if case.drafts else 1)
        return (
            case.prefix == "shared" and cache.reuses_states and len(cache.boundaries(longest)) > 0
        )

    def can_preempt(self, case: Case) -> bool:
        """Whether requests of a case need further slots while they run, and too few are there."""
        return case.pool == "tight" and self.matrix.selection(case).cache.block_size is not None

    def _outcome(
        self,
        case: Case,
        selection: Selection,
        wanted: Sequence[Prompt],
        outputs: Sequence[RequestOutput],
        stats: EngineStats,
        seconds: float,
    ) -> Outcome:
        differences = [
            (nth, at)
            for nth, (prompt, output) in enumerate(zip(wanted, outputs, strict=True))
            for at, (token, other) in enumerate(zip(output.token_ids, prompt.expected, strict=True))
            if token != other
        ]
        exact = selection.decode.exact
        bound = LOGPROB_BOUNDS[case.state_dtype] + ACTIVATION_BOUNDS[case.dtype]
        return Outcome(
            tokens=sum(len(output.token_ids) for output in outputs),
            differing=len(differences),
            first_difference=differences[0] if differences else None,
            logprob_error=self.logprob_error(outputs),
            logprob_bound=bound,
            tokens_must_match=exact and case.state_dtype == case.dtype == "float32",
            preemptions=stats.preemptions,
            prefix_hits=stats.prefix_hits,
            cached_tokens=stats.cached_tokens,
            graph_steps=stats.graph_steps,
            steps=stats.steps,
            accepted_drafts=stats.accepted_drafts,
            seconds=round(seconds, 3),
        )

    def logprob_error(self, outputs: Sequence[RequestOutput]) -> float:
        """Greatest error of a chosen token's log-probability against float64."""
        exact = self.oracle.logprobs(
            [(output.prompt_token_ids, output.token_ids) for output in outputs]
        )
        greatest = torch.zeros((), dtype=torch.float64)
        for output, values in zip(outputs, exact, strict=True):
            assert output.logprobs is not None
            got = torch.tensor([one.logprob for one in output.logprobs], dtype=torch.float64)
            greatest = torch.maximum(greatest, (got - values).abs().max())  # NaN stays NaN
        return float(greatest)


def greedy(engine: Engine, prompts: Sequence[Tokens], counts: Sequence[int]) -> list[RequestOutput]:
    """Greedy tokens of prompts, so many of each, with their log-probabilities.

    Raises:
        AssertionError: a request ended otherwise.
    """
    params = [SamplingParams(max_tokens=count, ignore_eos=True, logprobs=0) for count in counts]
    outputs = engine.generate([list(prompt) for prompt in prompts], params)
    for output, count in zip(outputs, counts, strict=True):
        assert output.error is None, output.error
        assert len(output.token_ids) == count
    return outputs


def assert_idle(stats: EngineStats) -> None:
    """No request and no slot is left behind."""
    assert (stats.running, stats.waiting, stats.used_slots) == (0, 0, 0), stats
    assert stats.free_slots + stats.cached_slots == stats.total_slots, stats
