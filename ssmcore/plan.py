"""A step plan: all that the kernels need for one step, as host views and device views of one arena.

A plan is valid until the next step is planned: its host views until the one after. Parts hold
arrays by name; the core's own have typed properties, a plugin's are read by the name it declared.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy.typing as npt

from ssmcore.arena import Arena, Layout

if TYPE_CHECKING:
    import torch

    from ssmcore.step import Rows
    from ssmcore.strategies import Selection

PARTS = ("decode", "prefill", "cache", "classifier", "graph")


class Views:
    """Host and device views of one layout in one arena, made once and kept while the layout is.

    Args:
        rest: views of a layout that stands before this one; together they are all of the plan.
    """

    __slots__ = ("_device", "_host", "_rest", "arena", "layout")

    def __init__(self, arena: Arena, layout: Layout, rest: Views | None = None) -> None:
        self.arena = arena
        self.layout = layout
        self._rest = rest
        self._host: list[dict[str, dict[str, npt.NDArray[Any]]] | None] = [None, None]
        self._device: dict[tuple[str, str], torch.Tensor] = {}

    def host(self, half: int) -> dict[str, dict[str, npt.NDArray[Any]]]:
        """Part name to field name to writable host view, in one half of the arena."""
        views = self._host[half]
        if views is None:
            before = {} if self._rest is None else self._rest.host(half)
            views = self._host[half] = {part: dict(before.get(part, ())) for part in PARTS}
            for (part, field), entry in self.layout.entries.items():
                views[part][field] = self.arena.host(half, entry)
        return views

    def tensor(self, part: str, field: str) -> torch.Tensor:
        """Device view of one field."""
        name = part, field
        tensor = self._device.get(name)
        if tensor is None:
            entry = self.layout.entries.get(name)
            if entry is None:
                if self._rest is None:
                    raise KeyError(f"this plan's part {part!r} has no field {field!r}")
                return self._rest.tensor(part, field)
            tensor = self._device[name] = self.arena.on_device(entry)
        return tensor


class Part:
    """Named arrays of one part of a plan."""

    __slots__ = ("_name", "_views", "host")

    def __init__(self, name: str, views: Views, host: Mapping[str, npt.NDArray[Any]]) -> None:
        self._name = name
        self._views = views
        self.host = host

    def __contains__(self, field: str) -> bool:
        return field in self.host

    def tensor(self, field: str) -> torch.Tensor:
        """Device view of a field by its declared name."""
        return self._views.tensor(self._name, field)


class DecodePlan(Part):
    """The decode rows of a step, padding rows included; all index tensors int32.

    Attributes:
        num_rows: decode rows; num_tokens: their tokens, without padding.
    """

    __slots__ = ("num_rows", "num_tokens")

    def __init__(
        self,
        views: Views,
        host: Mapping[str, npt.NDArray[Any]],
        num_rows: int,
        num_tokens: int,
    ) -> None:
        super().__init__("decode", views, host)
        self.num_rows = num_rows
        self.num_tokens = num_tokens

    @property
    def state_indices(self) -> torch.Tensor:
        """(rows, 1 + S), or (rows, W) in a mode that hands out whole block table rows."""
        return self.tensor("state_indices")

    @property
    def conv_read_slots(self) -> torch.Tensor:
        """(rows,), slot of the conv state before the step."""
        return self.tensor("conv_read_slots")

    @property
    def state_read_slots(self) -> torch.Tensor:
        """(rows,), slot of the last whole SSM state."""
        return self.tensor("state_read_slots")

    @property
    def write_slots(self) -> torch.Tensor:
        """(rows,), or (rows, 1 + S) where accepted-token counts are given; 0 for padding rows."""
        return self.tensor("write_slots")

    @property
    def query_start_loc(self) -> torch.Tensor | None:
        """(rows + 1,), only where accepted-token counts are given; else one token a row."""
        return self.tensor("query_start_loc") if "query_start_loc" in self.host else None

    @property
    def num_accepted_tokens(self) -> torch.Tensor | None:
        """(rows,), tokens accepted from each row's previous step."""
        return self.tensor("num_accepted_tokens") if "num_accepted_tokens" in self.host else None


class PrefillPlan(Part):
    """The prefill rows of a step; all index tensors int32, `has_initial_states` bool.

    Attributes:
        num_rows, num_tokens: prefill rows and their tokens.
        max_query_len: longest row in tokens.
        num_state_writes: states written besides each row's last (mode `all`).
    """

    __slots__ = ("max_query_len", "num_rows", "num_state_writes", "num_tokens")

    def __init__(
        self,
        views: Views,
        host: Mapping[str, npt.NDArray[Any]],
        num_rows: int,
        num_tokens: int,
        max_query_len: int,
        num_state_writes: int,
    ) -> None:
        super().__init__("prefill", views, host)
        self.num_rows = num_rows
        self.num_tokens = num_tokens
        self.max_query_len = max_query_len
        self.num_state_writes = num_state_writes

    @property
    def query_start_loc(self) -> torch.Tensor:
        """(rows + 1,), token offsets among the prefill tokens."""
        return self.tensor("query_start_loc")

    @property
    def has_initial_states(self) -> torch.Tensor:
        """(rows,), bool: the row has tokens computed before."""
        return self.tensor("has_initial_states")

    @property
    def state_indices(self) -> torch.Tensor:
        """(rows,), or (rows, W) in a mode that hands out whole block table rows."""
        return self.tensor("state_indices")

    @property
    def conv_read_slots(self) -> torch.Tensor:
        """(rows,), slot of the conv state before the step; read only with initial states."""
        return self.tensor("conv_read_slots")

    @property
    def state_read_slots(self) -> torch.Tensor:
        """(rows,), slot of the SSM state before the step; read only with initial states."""
        return self.tensor("state_read_slots")

    @property
    def cu_seqlens(self) -> torch.Tensor:
        """(chunks + 1,), token offsets of the chunks."""
        return self.tensor("cu_seqlens")

    @property
    def seq_idx(self) -> torch.Tensor:
        """(chunks,), row of each chunk."""
        return self.tensor("seq_idx")

    @property
    def last_indices(self) -> torch.Tensor:
        """(rows,), last chunk of each row."""
        return self.tensor("last_indices")

    @property
    def batch_ptr(self) -> torch.Tensor:
        """(programs,), row of each convolution program."""
        return self.tensor("batch_ptr")

    @property
    def token_chunk_offset(self) -> torch.Tensor:
        """(programs,), index of each convolution program within its row."""
        return self.tensor("token_chunk_offset")

    @property
    def state_write_rows(self) -> torch.Tensor:
        """(writes,), row of each state that is written."""
        return self.tensor("write_rows")

    @property
    def state_write_ends(self) -> torch.Tensor:
        """(writes,), packed token offset (exclusive) after which each written state stands."""
        return self.tensor("write_ends")

    @property
    def state_write_chunks(self) -> torch.Tensor:
        """(writes,), chunk that ends there."""
        return self.tensor("write_chunks")

    @property
    def state_write_slots(self) -> torch.Tensor:
        """(writes,), slot that receives each written state, conv state and SSM state alike."""
        return self.tensor("state_write_slots")


@dataclass(slots=True, eq=False)
class StepPlan:
    """The plan of one step; `to_dict` gives the printed form.

    Attributes:
        key: what the addresses of its fields depend on; () where there are prefills.
        rows: the step's rows on the host.
        lag: (decodes,), tokens by which each row's whole state lags, or None.
    """

    num_reqs: int
    num_decodes: int
    num_decode_tokens: int
    num_prefills: int
    num_prefill_tokens: int
    decode: DecodePlan | None
    prefill: PrefillPlan | None
    cache: Part | None
    rows: Rows
    key: tuple[int, ...]
    views: Views
    half: int
    lag: npt.NDArray[Any] | None
    selection: Selection
    replan: Callable[[StepPlan, npt.NDArray[Any]], StepPlan]

    @property
    def has_prefills(self) -> bool:
        """Whether the step has prefill rows; such a step never runs under a decode graph."""
        return self.num_prefills > 0

    def moved(self, rows: Rows, views: Views, half: int, key: tuple[int, ...]) -> StepPlan:
        """This plan with its arrays in other views."""
        host = views.host(half)
        decode = prefill = cache = None
        if self.decode is not None:
            decode = DecodePlan(views, host["decode"], self.num_decodes, self.num_decode_tokens)
        if self.prefill is not None:
            old = self.prefill
            prefill = PrefillPlan(
                views,
                host["prefill"],
                num_rows=old.num_rows,
                num_tokens=old.num_tokens,
                max_query_len=old.max_query_len,
                num_state_writes=old.num_state_writes,
            )
        if self.cache is not None:
            cache = Part("cache", views, host["cache"])
        return replace(
            self,
            decode=decode,
            prefill=prefill,
            cache=cache,
            rows=rows,
            views=views,
            half=half,
            key=key,
        )

    def with_block_table(self, block_table: npt.NDArray[Any] | list[list[int]]) -> StepPlan:
        """The same step for layers of another cache group, whose states stand in other slots.

        Nothing but slots is planned again; both plans stay valid side by side.

        Raises:
            StepError: another number of rows, slots that section 7's rules refuse, or a step with
                speculative tokens.
        """
        from ssmcore.step import table_of

        return self.replan(self, table_of(block_table))

    def to_dict(self) -> dict[str, Any]:
        """The plan as plain lists, integers and booleans, as `docs/steps.md` describes it."""
        from ssmcore.plan_format import plan_to_dict

        return plan_to_dict(self)
