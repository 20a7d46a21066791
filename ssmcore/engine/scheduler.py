"""Who runs next: first come first served under a token budget, with slots for every row.

Running requests have a row in persistent arrays; a step takes decodes first, then prefills in order
of arrival, then admits those who wait. When slots run out the request that arrived last makes room:
it is computed again later, from its prompt and what it generated so far.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from ssmcore.engine.blocks import BlockPool, PrefixHasher
from ssmcore.engine.requests import Request
from ssmcore.plan import StepPlan
from ssmcore.step import Step
from ssmcore.strategies import CacheMode, IntArray, Limits


@dataclass(slots=True, eq=False)
class Scheduled:
    """One step: the requests of its rows in order, and the step itself.

    Attributes:
        rows: (R,), the scheduler's row of each.
        sampling: (n,), positions within the step of rows that give new tokens.
        logit_tokens: packed offsets of the tokens whose logits are wanted, in the order of
            `sampling`: each row's last, or all `1 + d` of a row with `d` drafts.
        logit_counts: (n,), how many of them each row has.
    """

    requests: list[Request]
    rows: IntArray
    query_lens: IntArray
    step: Step
    sampling: IntArray
    logit_tokens: IntArray
    logit_counts: IntArray


class Scheduler:
    """Queues, rows and slots of all requests.

    Attributes:
        waiting: requests without a row, the next first.
        running: requests with a row, in order of arrival.
        preemptions, prefix_queries, prefix_hits, cached_tokens: counts so far.
    """

    def __init__(self, cache: CacheMode, limits: Limits, num_slots: int) -> None:
        self.cache = cache
        self.limits = limits
        self.pool = BlockPool(num_slots)
        self.hasher = PrefixHasher(cache.boundaries(limits.max_model_len))
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self.preemptions = self.prefix_queries = self.prefix_hits = self.cached_tokens = 0
        rows = limits.max_num_seqs
        self._free_rows = list(range(rows - 1, -1, -1))
        width = cache.table_width(limits.max_model_len)
        self._table = np.zeros((rows, width), dtype=np.int32)
        self._computed = np.zeros(rows, dtype=np.int64)
        self._anchor = np.zeros(rows, dtype=np.int64)
        self._first_held = np.zeros(rows, dtype=np.int64)
        self._accepted = np.ones(rows, dtype=np.int64)
        self._draft_slots: dict[int, list[int]] = {}
        self._coming: set[bytes] = set()
        self._rows: IntArray | None = None  # of the running requests, in their order

    # -- requests come and go --------------------------------------------------------------------

    def add(self, request: Request) -> None:
        """Let a request wait for its turn."""
        self.waiting.append(request)

    def remove(self, request: Request) -> None:
        """Forget a request wherever it is; its slots are released."""
        if request.row >= 0:
            self.running.remove(request)
            self._vacate(request)
        else:
            self.waiting.remove(request)

    def _vacate(self, request: Request) -> None:
        row = request.row
        for slot in self._table[row][self._table[row] > 0].tolist():
            self.pool.release(slot)
        self._table[row] = 0
        self._accepted[row] = 1
        self._draft_slots.pop(row, None)
        self._free_rows.append(row)
        self._rows = None
        request.row = -1
        request.drafts = []

    def _preempt_last(self) -> Request:
        """Take the row from the request that arrived last; it waits in front of all others."""
        request = max(self.running, key=lambda running: running.number)
        self.running.remove(request)
        self._vacate(request)
        request.preemptions += 1
        self.preemptions += 1
        self.waiting.appendleft(request)
        return request

    def restart(self) -> None:
        """Take the rows from all running requests: a step was broken off, their states are void."""
        for request in self.waiting:
            if request.row >= 0:  # broken off while it was admitted
                self._vacate(request)
        while self.running:
            self._preempt_last()

    # -- a step ------------------------------------------------------------------------------------

    def schedule(self) -> Scheduled | None:
        """The next step, or None if nothing can run."""
        steady = self._steady_step()
        if steady is not None:
            return steady
        budget = self.limits.max_num_batched_tokens
        preemptions = self.preemptions
        self._coming.clear()
        ends: dict[int, int] = {}  # number of the request -> sequence length after the step
        decoding, prefilling = self._by_phase()
        for request in decoding[:budget]:
            if request.row >= 0 and budget > 0:
                budget -= self._schedule_decode(request, budget, ends)
        for request in prefilling:
            if request.row >= 0 and budget > 0:
                budget -= self._schedule_prefill(request, budget, ends)
        if self.preemptions == preemptions:
            self._admit_waiting(budget, ends)
        chosen = [request for request in self.running if request.number in ends]
        return self._step(chosen, ends) if chosen else None

    def _steady_step(self) -> Scheduled | None:
        """One token for every running request, without a look at each; the common case.

        None unless all of them decode without drafts, there are slots for all, and nobody could be
        admitted.
        """
        count = len(self.running)
        if (
            not 0 < count <= self.limits.max_num_batched_tokens
            or self.limits.num_spec_tokens
            or (self.waiting and self._free_rows)
        ):
            return None
        if self._rows is None:
            self._rows = np.array([request.row for request in self.running], dtype=np.int64)
        rows = self._rows
        computed, anchor = self._computed[rows], self._anchor[rows]
        if (computed < anchor).any():
            return None
        seq_lens = computed + 1
        if self.cache.block_size is not None:
            held = self._table[rows, self.cache.column(seq_lens)]
            for at in np.flatnonzero(held == 0).tolist():
                if not self._allocate(self.running[at], int(computed[at]), int(seq_lens[at])):
                    return None
        ones = np.ones(count, dtype=np.int64)
        loc = np.arange(count + 1)
        step = Step(
            query_start_loc=loc,
            seq_lens=seq_lens,
            is_prefilling=np.zeros(count, dtype=np.bool_),
            block_table=self._table[rows],
            decode_base=anchor,
        )
        requests = self.running.copy()
        return Scheduled(requests, rows, ones, step, loc[:-1], loc[:-1], ones)

    def _by_phase(self) -> tuple[list[Request], list[Request]]:
        """Running requests that decode, and those that still prefill."""
        rows = np.array([request.row for request in self.running], dtype=np.int64)
        done = (self._computed[rows] >= self._anchor[rows]).tolist()
        decoding = [one for one, ready in zip(self.running, done, strict=True) if ready]
        return decoding, [one for one, ready in zip(self.running, done, strict=True) if not ready]

    def _schedule_decode(self, request: Request, budget: int, ends: dict[int, int]) -> int:
        """Give a decoding request its token and its drafts; returns the tokens spent."""
        known = len(request.tokens)
        request.drafts = []
        if request.ngrams is not None:
            room = min(self.limits.num_spec_tokens, budget - 1, request.limit - known - 1)
            request.drafts = request.ngrams.draft(room) if room > 0 else []
        end = known + len(request.drafts)
        if not self._reserve(request, end):
            return 0
        ends[request.number] = end
        return 1 + len(request.drafts)

    def _schedule_prefill(self, request: Request, budget: int, ends: dict[int, int]) -> int:
        """Give a running prefill its share; returns the tokens spent."""
        computed = int(self._computed[request.row])
        end = self._prefill_end(request, computed, budget)
        if end == computed or not self._reserve(request, end):
            return 0
        ends[request.number] = end
        self._announce(request, computed, end)
        return end - computed

    def _prefill_end(self, request: Request, computed: int, budget: int) -> int:
        target = int(self._anchor[request.row])
        limit = min(target, computed + budget)
        end = self.cache.prefill_end(computed, limit, target)
        if not self._moves_draft_slots or end == target:
            return end
        # A lone token behind a boundary would run as a decode and write over the state published
        # there: steps take two tokens at least, and leave none or two at least.
        for wanted in (end, limit):
            fit = wanted - (target - wanted == 1)
            if fit - computed >= 2:
                return fit
        return computed

    @property
    def _moves_draft_slots(self) -> bool:
        """Whether rows have `1 + S` slots that move along with the running block."""
        return self.limits.num_spec_tokens > 0 and self.cache.block_size is not None

    def _admit_waiting(self, budget: int, ends: dict[int, int]) -> None:
        """Admit requests in order; one whose prefix this very step computes waits to find it."""
        at = 0
        while budget > 0 and self._free_rows and at < min(len(self.waiting), len(self._table)):
            request = self.waiting[at]
            prefix = self._find_prefix(request)
            if prefix is None:
                at += 1
                continue
            spent = self._admit(request, *prefix, budget, ends)
            if spent == 0:
                return
            budget -= spent

    def _admit(
        self, request: Request, computed: int, slot: int, budget: int, ends: dict[int, int]
    ) -> int:
        """Give a waiting request a row and its first tokens; returns the tokens spent, or 0."""
        row = self._free_rows.pop()
        request.row = row
        self._anchor[row] = len(request.tokens)
        self._computed[row] = computed
        self._first_held[row] = self.cache.column(np.array([computed]))[0]
        if slot:
            self.pool.refer(slot)
            self._table[row, self._first_held[row]] = slot
        end = self._prefill_end(request, computed, budget)
        if end == computed or not self._allocate(request, computed, end):
            self._vacate(request)
            return 0
        self.waiting.remove(request)
        self._insert(request)
        self._count_prefix(request, computed)
        ends[request.number] = end
        self._announce(request, computed, end)
        return end - computed

    def _insert(self, request: Request) -> None:
        """Keep `running` in order of arrival."""
        at = len(self.running)
        while at and self.running[at - 1].number > request.number:
            at -= 1
        self.running.insert(at, request)
        self._rows = None

    def _find_prefix(self, request: Request) -> tuple[int, int] | None:
        """Longest published prefix that leaves a token to run: its tokens and its slot, or 0, 0.

        None where a prefill of the step that is being scheduled computes a longer one.
        """
        if not self.cache.reuses_states:
            return 0, 0
        most = len(request.tokens) - (2 if self._moves_draft_slots else 1)
        count = bisect_right(self.hasher.boundaries, most)
        self.hasher.extend(request.hashes, request.tokens, count)
        for nth in range(count - 1, -1, -1):
            digest = request.hashes[nth]
            slot = self.pool.find(digest)
            if slot is not None:
                return self.hasher.boundaries[nth], slot
            if digest in self._coming:
                return None
        return 0, 0

    def _announce(self, request: Request, computed: int, end: int) -> None:
        """Note the prefixes that a prefill of the step will publish once it has run."""
        if self.cache.reuses_states and not (
            self._moves_draft_slots and end == self._anchor[request.row]
        ):
            for tokens in self.cache.published(computed, end):
                nth = bisect_left(self.hasher.boundaries, tokens)
                self.hasher.extend(request.hashes, request.tokens, nth + 1)
                self._coming.add(request.hashes[nth])

    def _count_prefix(self, request: Request, computed: int) -> None:
        if self.cache.reuses_states:
            self.prefix_queries += 1
            self.prefix_hits += computed > 0
        self.cached_tokens += computed
        if request.preemptions == 0:
            request.cached_tokens = computed

    def _reserve(self, request: Request, end: int) -> bool:
        """Slots for a running request's step, others making room; False if it had to itself."""
        computed = int(self._computed[request.row])
        while not self._allocate(request, computed, end):
            if self._preempt_last() is request:
                return False
        return True

    def _allocate(self, request: Request, computed: int, end: int) -> bool:
        """Give a row the slots that a step to `end` writes; False, nothing changed, if too few."""
        if self._moves_draft_slots and computed >= self._anchor[request.row]:
            return self._place_draft_slots(request.row, computed, end)
        written = self.cache.columns_written(computed, end)
        if self.cache.block_size is None:
            written = range(written.start, written.stop + self.limits.num_spec_tokens)
        held = self._table[request.row]
        missing = [column for column in written if not held[column]]
        if not missing:
            return True
        slots = self.pool.allocate(len(missing))
        if slots is None:
            return False
        held[missing] = slots
        return True

    def _place_draft_slots(self, row: int, computed: int, end: int) -> bool:
        """Put a decoding row's `1 + S` slots where the step's running block is.

        Ids move, states never do. The first slot is the one that prefill left the state in.
        """
        table = self._table[row]
        slots = self._draft_slots.get(row)
        if slots is None:
            more = self.pool.allocate(self.limits.num_spec_tokens)
            if more is None:
                return False
            current = int(table[self.cache.column(np.array([computed]))[0]])
            slots = self._draft_slots[row] = [current, *more]
        first = int(self.cache.column(np.array([end]))[0])
        table[:] = 0
        table[first : first + len(slots)] = slots
        return True

    def _step(self, chosen: list[Request], ends: dict[int, int]) -> Scheduled:
        """The step's arrays: decodes and one-token prompt tails first, then prefills."""
        rows = np.array([request.row for request in chosen], dtype=np.int64)
        seq_lens = np.array([ends[request.number] for request in chosen], dtype=np.int64)
        computed = self._computed[rows]
        behind = (computed < self._anchor[rows]) & ((seq_lens - computed > 1) | (computed == 0))
        order = np.argsort(behind, kind="stable")
        rows, seq_lens, computed = rows[order], seq_lens[order], computed[order]
        query_lens = seq_lens - computed
        loc = np.zeros(len(rows) + 1, dtype=np.int64)
        np.cumsum(query_lens, out=loc[1:])
        requests = [chosen[at] for at in order.tolist()]
        prefilling = computed < self._anchor[rows]
        speculative = self.limits.num_spec_tokens > 0
        step = Step(
            query_start_loc=loc,
            seq_lens=seq_lens,
            is_prefilling=prefilling,
            block_table=self._table[rows],
            decode_base=self._anchor[rows],
            num_accepted_tokens=self._accepted[rows] if speculative else None,
            num_draft_tokens=np.where(prefilling, -1, query_lens - 1) if speculative else None,
        )
        sampling = np.flatnonzero(seq_lens >= self._anchor[rows])
        counts = np.where(prefilling, 1, query_lens)[sampling]
        logit_tokens = loc[1:][sampling] - 1
        if speculative:
            row_of = np.repeat(np.arange(len(counts)), counts)
            nth = np.arange(len(row_of)) - (np.cumsum(counts) - counts)[row_of]
            logit_tokens = (logit_tokens - counts + 1)[row_of] + nth
        return Scheduled(requests, rows, query_lens, step, sampling, logit_tokens, counts)

    def finish_step(
        self, scheduled: Scheduled, plan: StepPlan, accepted: IntArray | None = None
    ) -> None:
        """The step has run: move on, publish whole states, release what no later step reads.

        Args:
            accepted: (R,), tokens of each row that stand, with speculative tokens; None: all.
        """
        rows, seq_lens = scheduled.rows, scheduled.step.seq_lens
        computed = seq_lens - scheduled.query_lens
        if accepted is not None:
            decoded = computed >= self._anchor[rows]
            seq_lens = np.where(decoded, computed + accepted, seq_lens)
            self._accepted[rows] = np.where(decoded, accepted, 1)
        self._computed[rows] = seq_lens
        if self.cache.block_size is None:
            return
        if (
            self._moves_draft_slots
        ):  # the slot of a row's current state is written again: not shared
            unfinished = np.flatnonzero(seq_lens < self._anchor[rows])
            self._publish(scheduled, computed, seq_lens, unfinished)
            prefills = np.flatnonzero(computed < self._anchor[rows])
            self._release(rows[prefills], seq_lens[prefills])
            return
        self._publish(scheduled, computed, seq_lens, np.arange(len(rows)))
        oldest = seq_lens.copy()
        if plan.lag is not None:  # the next step may still read the state that this one read
            decodes = min(plan.num_decodes, len(rows))
            oldest[:decodes] = (computed[:decodes] - plan.lag[:decodes]).clip(min=0)
        self._release(rows, oldest)

    def _release(self, rows: IntArray, oldest: IntArray) -> None:
        """Give up columns before the one that holds the state after `oldest` tokens."""
        first = self.cache.column(oldest)
        behind = np.flatnonzero(first > self._first_held[rows])
        for at in behind.tolist():
            row = int(rows[at])
            passed = self._table[row, self._first_held[row] : first[at]]
            for slot in passed[passed > 0].tolist():
                self.pool.release(slot)
            passed[:] = 0
            self._first_held[row] = first[at]

    def _publish(
        self, scheduled: Scheduled, computed: IntArray, seq_lens: IntArray, among: IntArray
    ) -> None:
        """Let others find the whole states that the step left at boundaries."""
        boundary = self.cache.last_boundary(seq_lens)
        if boundary is None or not self.cache.reuses_states:
            return
        for at in among[boundary[among] > computed[among]].tolist():
            request = scheduled.requests[at]
            points = self.cache.published(int(computed[at]), int(seq_lens[at]))
            for tokens, column in zip(points, self._columns(points), strict=True):
                nth = bisect_left(self.hasher.boundaries, tokens)
                self.hasher.extend(request.hashes, request.tokens, nth + 1)
                slot = int(self._table[scheduled.rows[at], column])
                if slot:
                    self.pool.publish(slot, request.hashes[nth])

    def _columns(self, points: Sequence[int]) -> npt.NDArray[Any]:
        return self.cache.column(np.array(points, dtype=np.int64))
