"""From a step to its plan: classify, ask the decode algorithm and the cache mode, lay out, upload.

`Pipeline` holds four plain strategy objects and the arena; it knows no engine and no model.
Planning is host work on NumPy views with one upload at its end, and reads nothing back from a
device.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from ssmcore import validation
from ssmcore.arena import Arena, Layout
from ssmcore.chunks import PrefillSizes, fill_chunks, fill_writes
from ssmcore.errors import StepError
from ssmcore.observers import Observer
from ssmcore.plan import DecodePlan, Part, PrefillPlan, StepPlan, Views
from ssmcore.plan_layout import (
    chunk_fields,
    declared_fields,
    largest_plan_bytes,
    row_fields,
)
from ssmcore.slots import DecodeSlots, PrefillSlots, check_slots
from ssmcore.step import Rows, Step
from ssmcore.strategies import CacheMode, IntArray, Selection

if TYPE_CHECKING:
    import torch

    from ssmcore.registry import Registry
    from ssmcore.settings import Settings

_MAX_LAYOUTS = 4096
_MAX_PLAN_BYTES = 2**31


class Pipeline:
    """Makes plans with the four chosen strategies.

    Args:
        selection: the strategies and limits, from `ssmcore.selection.select`.
        device: where plans are uploaded to; None plans on the host alone.
        num_slots: slots of the attached state pool, null slot included; None where there is none.
        observers: told of every planned step.
        max_plan_bytes: a step whose plan takes more is refused.
    """

    def __init__(
        self,
        selection: Selection,
        *,
        device: torch.device | str | None = None,
        num_slots: int | None = None,
        observers: Sequence[Observer] = (),
        max_plan_bytes: int = _MAX_PLAN_BYTES,
    ) -> None:
        self.selection = selection
        self.limits = selection.limits
        self.num_slots = validation.MAX_SLOTS if num_slots is None else num_slots
        self.observers = tuple(observers)
        if isinstance(device, str):
            import torch

            device = torch.device(device)
        self.device = device
        self._declared = declared_fields(selection)
        self._capacity = min(
            largest_plan_bytes(self.limits, selection, self._declared), max_plan_bytes
        )
        self._max_plan_bytes = max_plan_bytes
        self._finest = min(self.limits.chunk_size, selection.cache.block_size or 8, 8)
        self._arenas: list[Arena] = []
        self._large: dict[int, Arena] = {}
        self._kept: dict[tuple[int, ...], Views] = {}
        self._conflicts = validation.SlotConflicts()
        self._groups = 0

    @classmethod
    def from_settings(
        cls,
        settings: Settings,
        registry: Registry | None = None,
        *,
        device: torch.device | str | None = None,
        num_slots: int | None = None,
    ) -> Pipeline:
        """Choose the strategies that `settings` name and plan with them.

        Raises:
            SsmcoreError: an unknown strategy or option, or a combination that has no plan.
        """
        from ssmcore.registry import Registry
        from ssmcore.selection import select

        registry = Registry.load() if registry is None else registry
        selection = select(settings, registry)
        return cls(selection, device=device, num_slots=num_slots, observers=registry.observers())

    def plan(self, step: Step) -> StepPlan:
        """Validate a step and plan it.

        Raises:
            StepError: the step breaks a rule; nothing was touched.
        """
        rows = step.rows()
        validation.check_rows(rows, self.limits)
        top = validation.check_table(rows.block_table, self.num_slots)
        decode = self.selection.decode
        if decode.needs_decode_base and rows.decode_base is None:
            raise StepError(
                "decode_base",
                f"decode.name = {self.selection.names['decode']!r} needs decode_base for every row",
            )
        num_decodes = self.selection.classifier.num_decodes(rows)
        if num_decodes < rows.num_rows:
            self._check_prefills(rows, num_decodes)
        self._groups = 0
        plan = self._plan(rows, num_decodes, top)
        for observer in self.observers:
            observer.step_planned(plan)
        return plan

    def plan_for_capture(self, num_rows: int) -> StepPlan:
        """The plan a graph of `num_rows` decode rows is captured with: all rows on the null slot.

        Every row has `1 + S` tokens and, with speculative tokens, `num_accepted_tokens = 1 + S`.

        Raises:
            StepError: more rows than the graph padding or the engine takes, or none.
        """
        sizes = self.selection.graph.sizes
        most = sizes[-1] if sizes else self.limits.max_num_seqs
        if not 1 <= num_rows <= most:
            raise StepError(
                "capture_size", f"a graph of {num_rows} rows was asked for; it must be 1 to {most}"
            )
        drafts = self.limits.num_spec_tokens
        width = self.selection.cache.table_width(self.limits.max_model_len)
        zeros = np.zeros(num_rows, dtype=np.int64)
        rows = Rows()
        rows.query_start_loc = np.arange(num_rows + 1) * (1 + drafts)
        rows.query_lens = np.full(num_rows, 1 + drafts)
        rows.tokens = np.zeros((2, num_rows), dtype=np.int64)
        rows.computed, rows.seq_lens = rows.tokens
        rows.decode_base = zeros
        rows.is_prefilling = np.zeros(num_rows, dtype=np.bool_)
        rows.block_table = np.zeros((num_rows, width), dtype=np.int32)
        rows.num_accepted_tokens = np.full(num_rows, 1 + drafts) if drafts else None
        rows.num_draft_tokens = None
        rows.prev_last_scheduled_block = zeros if drafts else None
        rows.num_rows = num_rows
        rows.num_real = 0
        rows.all_have_prior = False
        self._groups = 0
        return self._plan(rows, num_rows, 0, padding_accepted=1 + drafts)

    def _check_prefills(self, rows: Rows, num_decodes: int) -> None:
        validation.check_padding(rows, num_decodes)
        if self.selection.decode.keeps_pending_inputs:
            validation.check_decodable(rows, num_decodes, "a prefill ignores its pending inputs")
        elif self.limits.num_spec_tokens:
            validation.check_decodable(rows, num_decodes, "a prefill cannot be rolled back")

    def _plan(self, rows: Rows, num_decodes: int, top: int, padding_accepted: int = 1) -> StepPlan:
        selection = self.selection
        cache = selection.cache
        drafts = self.limits.num_spec_tokens
        decodes = rows.part(0, num_decodes) if num_decodes else None
        prefills = rows.part(num_decodes, rows.num_rows) if num_decodes < rows.num_rows else None

        prefill_slots = sizes = None
        if prefills is not None:
            self._check_plan_size(prefills)
            prefill_slots = PrefillSlots(prefills, cache, drafts)
            sizes = PrefillSizes(prefills, self.limits.chunk_size)
        views, key = self._views(rows, num_decodes, prefill_slots, sizes)
        half = views.arena.next_half()
        host = views.host(half)

        lag: IntArray | None = None
        decode_slots = None
        if decodes is not None:
            lag = selection.decode.plan_fields(decodes, cache, host["decode"])
            decode_slots = DecodeSlots(decodes, cache, drafts, lag)
        check_slots(decode_slots, prefill_slots, num_decodes, self._conflicts, top)

        decode_part = prefill_part = None
        num_tokens = rows.query_start_loc.item(-1)
        num_decode_tokens = rows.query_start_loc.item(num_decodes)
        if decodes is not None and decode_slots is not None:
            _fill_decode(decodes, decode_slots, cache, host["decode"], padding_accepted)
            decode_part = DecodePlan(views, host["decode"], num_decodes, num_decode_tokens)
        if prefills is not None and prefill_slots is not None and sizes is not None:
            out = host["prefill"]
            _fill_prefill(prefills, prefill_slots, sizes, out)
            prefill_slots.fill(cache, out)
            prefill_part = PrefillPlan(
                views,
                out,
                num_rows=prefills.num_rows,
                num_tokens=num_tokens - num_decode_tokens,
                max_query_len=prefills.query_lens.item(prefills.query_lens.argmax()),
                num_state_writes=len(prefill_slots.write_rows) - prefills.num_rows,
            )
        self._fill_declared(rows, host)
        views.arena.upload(views.layout.nbytes)
        return StepPlan(
            num_reqs=rows.num_rows,
            num_decodes=num_decodes,
            num_decode_tokens=num_decode_tokens,
            num_prefills=rows.num_rows - num_decodes,
            num_prefill_tokens=num_tokens - num_decode_tokens,
            decode=decode_part,
            prefill=prefill_part,
            cache=Part("cache", views, host["cache"]) if host["cache"] else None,
            rows=rows,
            key=key,
            views=views,
            half=half,
            lag=lag,
            selection=selection,
            replan=self._replan,
        )

    def _replan(self, plan: StepPlan, block_table: npt.NDArray[Any]) -> StepPlan:
        """The plan of the same step over another block table (`StepPlan.with_block_table`)."""
        if self.limits.num_spec_tokens:
            raise StepError(
                "speculative",
                "with_block_table cannot serve a step with speculative tokens: each cache group's"
                " accepted states stand in columns of its own",
            )
        if len(block_table) != plan.num_reqs:
            raise StepError(
                "length",
                f"the other block table has {len(block_table)} rows, the step has {plan.num_reqs}",
            )
        top = validation.check_table(block_table, self.num_slots)
        cache = self.selection.cache
        rows = plan.rows.with_table(block_table)
        num_decodes = plan.num_decodes
        decode_slots = prefill_slots = None
        if plan.decode is not None:
            decode_slots = DecodeSlots(rows.part(0, num_decodes), cache, 0, plan.lag)
        if plan.prefill is not None:
            prefill_slots = PrefillSlots(rows.part(num_decodes, rows.num_rows), cache, 0)
        check_slots(decode_slots, prefill_slots, num_decodes, self._conflicts, top)

        self._groups += 1
        sizes = None
        if prefill_slots is not None:
            sizes = PrefillSizes(prefill_slots.rows, self.limits.chunk_size)
        views, key = self._views(rows, num_decodes, prefill_slots, sizes, self._groups)
        half = views.arena.next_half()
        host = views.host(half)
        source = plan.views.host(plan.half)
        for part, values in host.items():
            for name, target in values.items():
                if target.shape == source[part][name].shape:
                    target[...] = source[part][name]
        if decode_slots is not None:
            decode_slots.fill(cache, host["decode"])
        if prefill_slots is not None:
            prefill_slots.fill(cache, host["prefill"])
        views.arena.upload(views.layout.nbytes)
        return plan.moved(rows, views, half, key)

    def _views(
        self,
        rows: Rows,
        num_decodes: int,
        prefill_slots: PrefillSlots | None,
        sizes: PrefillSizes | None,
        group: int = 0,
    ) -> tuple[Views, tuple[int, ...]]:
        """Views for a step, and the plan's key.

        Those of all but chunks and written states are kept, since they depend on few numbers.
        """
        accepted = rows.num_accepted_tokens is not None
        key = (rows.num_rows, rows.block_table.shape[1], int(accepted), group)
        kept_as = (*key, num_decodes)
        views = self._kept.get(kept_as)
        if views is None:
            layout = Layout(row_fields(rows, num_decodes, self.selection, self._declared))
            views = Views(self._arena(group, layout.nbytes), layout)
            if views.arena is self._arenas[group] and len(self._kept) < _MAX_LAYOUTS:
                self._kept[kept_as] = views
        if prefill_slots is None or sizes is None:
            return views, key
        num_writes = len(prefill_slots.write_rows)
        layout = Layout(chunk_fields(sizes, num_writes), start=views.layout.nbytes)
        arena = self._arena(group, layout.nbytes)
        if arena is not views.arena:
            views = Views(arena, views.layout)
        return Views(arena, layout, views), ()

    def _arena(self, group: int, nbytes: int) -> Arena:
        """The arena of a cache group's plans, or one for a plan beyond the engine's limits."""
        while len(self._arenas) <= group:
            self._arenas.append(Arena(self._capacity, self.device))
        return self._arenas[group] if nbytes <= self._capacity else self._outsized(group, nbytes)

    def _outsized(self, group: int, nbytes: int) -> Arena:
        """The arena of steps beyond the engine's limits; kept, since such steps come in rows."""
        arena = self._large.get(group)
        if arena is None or arena.nbytes < nbytes:
            arena = self._large[group] = Arena(nbytes, self.device)
        return arena

    def _check_plan_size(self, prefills: Rows) -> None:
        """Refuse a step whose metadata alone would not fit in memory."""
        tokens = prefills.query_start_loc.item(-1)
        if tokens // self._finest * 24 > self._max_plan_bytes:
            raise StepError(
                "too_many_tokens",
                f"a step of {tokens} prefill tokens in pieces of {self._finest} is too large to"
                " plan; schedule fewer tokens",
            )

    def _fill_declared(self, rows: Rows, host: dict[str, dict[str, npt.NDArray[Any]]]) -> None:
        """Fill the cache mode's fields (and the classifier's and graph's), then pad all."""
        selection = self.selection
        if host["cache"]:
            selection.cache.plan_fields(rows, host["cache"])
        for part in ("classifier", "graph"):
            if host[part]:
                getattr(selection, part).plan_fields(rows, host[part])
        if rows.num_real < rows.num_rows:
            for part, field in self._declared:
                if field.name in host[part]:
                    host[part][field.name][rows.num_real :] = field.pad


def _fill_decode(
    rows: Rows,
    slots: DecodeSlots,
    cache: CacheMode,
    out: dict[str, npt.NDArray[Any]],
    padding_accepted: int,
) -> None:
    slots.fill(cache, out)
    if rows.num_accepted_tokens is not None:
        out["query_start_loc"][:] = rows.query_start_loc
        out["num_accepted_tokens"][:] = rows.num_accepted_tokens
        out["num_accepted_tokens"][rows.num_real :] = padding_accepted


def _fill_prefill(
    rows: Rows, slots: PrefillSlots, sizes: PrefillSizes, out: dict[str, npt.NDArray[Any]]
) -> None:
    out["query_start_loc"][:] = rows.query_start_loc
    np.greater(rows.computed, 0, out=out["has_initial_states"])
    if "num_computed_tokens" in out:
        out["num_computed_tokens"][:] = rows.computed
    fill_chunks(rows, sizes, out)
    fill_writes(rows, sizes, slots.write_rows, slots.write_tokens, out)
