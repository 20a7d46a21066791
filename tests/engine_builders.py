"""Engines over the bundled model for tests; plain functions, the model loaded once."""

from __future__ import annotations

from functools import cache
from typing import Any

from ssmcore.engine.engine import Engine
from ssmcore.engine.requests import RequestOutput, SamplingParams
from ssmcore.models.loading import LoadedModel, load_model
from ssmcore.settings import Settings

TEXT = b"""import os
import sys


class Stack:
    def __init__(self):
        self.items = []

    def push(self, item):
        self.items.append(item)

    def pop(self):
        return self.items.pop()


def main():
    stack = Stack()
    for name in sys.argv:
        stack.push(os.path.abspath(name))
    while stack.items:
        print(stack.pop())
"""
SLOT_BYTES = 8 * (8 * 64 * 64 * 4 + 3 * 640 * 4)  # baseline, float32


@cache
def quickstart() -> LoadedModel:
    return load_model("quickstart", device="cpu", dtype="float32")


def make_engine(**sections: Any) -> Engine:
    """An engine on the CPU with freed slots poisoned; sections as in the configuration file."""
    engine = {"device": "cpu", "max_model_len": 512, "poison_freed_slots": True}
    sections["engine"] = {**engine, **sections.get("engine", {})}
    sections.setdefault("decode", {"name": "baseline"})
    loaded = quickstart()
    return Engine(Settings.from_dict(sections), model=loaded.model, tokenizer=loaded.tokenizer)


def greedy(prompts: list[Any], max_tokens: int = 24, **sections: Any) -> list[tuple[int, ...]]:
    """Greedy tokens of prompts; checks that nothing is left behind."""
    with make_engine(**sections) as engine:
        outputs = engine.generate(prompts, SamplingParams(max_tokens=max_tokens, ignore_eos=True))
        assert_idle(engine)
    return [tokens_of(output) for output in outputs]


def tokens_of(output: RequestOutput) -> tuple[int, ...]:
    assert output.error is None, output.error
    return output.token_ids


def assert_idle(engine: Engine) -> None:
    stats = engine.stats()
    assert (stats.running, stats.waiting, stats.used_slots) == (0, 0, 0)
    assert stats.free_slots + stats.cached_slots == stats.total_slots


def prompts_of(*lengths: int) -> list[list[int]]:
    """Prompts of the given lengths from different places of `TEXT`."""
    text = TEXT * 3
    return [list(text[17 * n : 17 * n + length]) for n, length in enumerate(lengths)]
