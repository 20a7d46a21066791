"""A state pool that holds token sequences instead of numbers: says what each slot's state is *of*.

Runs what the scheduler schedules and the pipeline plans, and fails where a row reads a state that
is not that of its own tokens. Plain; no model, no tensors.
"""

from __future__ import annotations

import numpy as np
from planning_builders import make_pipeline

from ssmcore.engine.requests import Request, SamplingParams
from ssmcore.engine.scheduler import Scheduled, Scheduler
from ssmcore.plan import StepPlan

Tokens = tuple[int, ...]


def make_request(number: int, tokens: list[int], max_tokens: int, max_model_len: int) -> Request:
    return Request(
        request_id=f"request-{number}",
        number=number,
        prompt=None,
        num_prompt_tokens=len(tokens),
        tokens=list(tokens),
        params=SamplingParams(),
        limit=min(len(tokens) + max_tokens, max_model_len),
        seed=0,
        stream=False,
        arrival=0.0,
    )


def next_token(tokens: list[int]) -> int:
    """What the symbolic model says; a small vocabulary, so that requests meet."""
    return (7 * sum(tokens) + len(tokens)) % 3


class SymbolicEngine:
    """Scheduler and pipeline over slots that remember which tokens went into them.

    `conv`, `state`: slot to the tokens that its state is of; `ring`: slot to pending tokens.
    """

    def __init__(self, num_slots: int, **options: int | str) -> None:
        self.pipeline = make_pipeline(num_slots=num_slots, **options)
        selection = self.pipeline.selection
        self.scheduler = Scheduler(selection.cache, selection.limits, num_slots)
        self.conv: dict[int, Tokens] = {}
        self.state: dict[int, Tokens] = {}
        self.ring: dict[int, list[int]] = {}
        self.requests: list[Request] = []
        self.finished: dict[int, list[int]] = {}
        self.scheduled_tokens = 0

    def add(self, prompt: list[int], max_tokens: int) -> Request:
        longest = self.pipeline.limits.max_model_len
        request = make_request(len(self.requests), prompt, max_tokens, longest)
        self.requests.append(request)
        self.scheduler.add(request)
        return request

    def step(self) -> Scheduled | None:
        """One step, checked."""
        scheduled = self.scheduler.schedule()
        if scheduled is None:
            return None
        limits = self.pipeline.limits
        assert scheduled.step.query_start_loc[-1] <= limits.max_num_batched_tokens
        self._forget_freed()
        published = set(self.scheduler.pool._hash_of)
        plan = self.pipeline.plan(scheduled.step)
        assert set(self.scheduler.pool._hash_of) == published, "published before the step has run"
        self._run(scheduled, plan)
        self.scheduled_tokens += int(scheduled.step.query_start_loc[-1])
        self.scheduler.finish_step(scheduled, plan)
        for at in scheduled.sampling.tolist():
            request = scheduled.requests[at]
            request.tokens.append(next_token(request.tokens))
            if len(request.tokens) >= request.limit:
                self.scheduler.remove(request)
                self.finished[request.number] = request.tokens
        self.check()
        return scheduled

    def run(self, most: int = 10_000) -> None:
        """Until nothing is left to do."""
        for _ in range(most):
            if not self.scheduler.waiting and not self.scheduler.running:
                return
            assert self.step() is not None, "requests wait and nothing runs"
        raise AssertionError(f"not done after {most} steps")

    def _forget_freed(self) -> None:
        for slot in self.scheduler.pool.freed:
            for content in (self.conv, self.state, self.ring):
                content.pop(slot, None)
        self.scheduler.pool.freed.clear()

    def _run(self, scheduled: Scheduled, plan: StepPlan) -> None:
        """Read everything, then write everything, as the kernels do."""
        writes: list[tuple[dict[int, Tokens], int, Tokens]] = []
        rings: list[tuple[int, list[int]]] = []
        ends = scheduled.step.seq_lens.tolist()
        starts = (scheduled.step.seq_lens - scheduled.query_lens).tolist()
        tokens = [request.tokens for request in scheduled.requests]
        if plan.decode is not None:
            host = {name: values.tolist() for name, values in plan.decode.host.items()}
            for row in range(plan.num_decodes):
                before, after = tuple(tokens[row][: starts[row]]), tuple(tokens[row][: ends[row]])
                assert len(after) == len(before) + 1
                read, write = host["state_read_slots"][row], host["write_slots"][row]
                assert self.conv.get(host["conv_read_slots"][row]) == before
                pending = host["write_pos"][row] if "write_pos" in host else 0
                ring = self.ring.get(write, [])[:pending]
                assert self.state.get(read, ()) + tuple(ring) == before
                assert len(ring) == pending
                writes.append((self.conv, write, after))
                if "write_pos" not in host or host["is_flush"][row]:
                    writes.append((self.state, write, after))
                rings.append((write, [*ring, after[-1]]))
        if plan.prefill is not None:
            first = plan.num_decodes
            host = {name: values.tolist() for name, values in plan.prefill.host.items()}
            for row in range(first, len(tokens)):
                before = tuple(tokens[row][: starts[row]])
                assert host["has_initial_states"][row - first] == bool(before)
                if before:
                    assert self.conv.get(host["conv_read_slots"][row - first]) == before
                    assert self.state.get(host["state_read_slots"][row - first]) == before
            for row, end, slot in zip(
                host["write_rows"], host["write_ends"], host["state_write_slots"], strict=True
            ):
                length = starts[first + row] + end - host["query_start_loc"][row]
                after = tuple(tokens[first + row][:length])
                writes += [(self.conv, slot, after), (self.state, slot, after)]
        for target, slot, value in writes:
            assert slot > 0
            target[slot] = value
        self.ring.update(rings)

    def check(self) -> None:
        """Nothing leaked, references are right, and published states are what their hashes say."""
        scheduler, pool = self.scheduler, self.scheduler.pool
        held = np.zeros(pool.num_slots, dtype=np.int64)
        for request in scheduler.running:
            table = scheduler._table[request.row]
            np.add.at(held, table[table > 0], 1)
        assert held.tolist() == pool._references
        free, cached = set(pool._free), set(pool._cached)
        assert len(free) == len(pool._free)
        assert not free & cached
        assert free | cached == {slot for slot in range(1, pool.num_slots) if not held[slot]}
        assert cached <= set(pool._hash_of)
        assert not free & set(pool._hash_of)
        for slot, digest in pool._hash_of.items():
            assert pool._slot_of[digest] == slot
            content = self.state[slot]
            assert self.conv[slot] == content
            count = list(scheduler.hasher.boundaries).index(len(content)) + 1
            hashes: list[bytes] = []
            scheduler.hasher.extend(hashes, content, count)
            assert hashes[-1] == digest
        rows = [request.row for request in scheduler.running]
        assert len(set(rows)) == len(rows) <= scheduler.limits.max_num_seqs
        assert all(request.row < 0 for request in scheduler.waiting)
