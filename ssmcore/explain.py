"""A plan in words: for each row what it is and why, what it reads and writes, when it flushes.

For people who look at one step; nothing here decides anything. Reasons are told from the step's own
numbers, so they hold for strategies of third parties too.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from ssmcore.plan import Part, StepPlan
from ssmcore.replay import steps_since_anchor
from ssmcore.step import Rows
from ssmcore.strategies import Selection

_NONE = "-"


@dataclass(frozen=True, slots=True)
class RowStory:
    """One row of a step in words, or all its padding rows; "-" where nothing applies.

    Attributes:
        row: its number, or "first..last" of the padding rows.
        kind: "decode", "prefill" or "padding".
        tokens: those of this step, as "first..last" of the row's sequence, and their count.
        conv_read, state_read, writes: slots.
        cursor: the decode algorithm's fields of this row.
        flush: whether the whole state is written, and why.
    """

    row: str
    kind: str
    why: str
    tokens: str
    conv_read: str
    state_read: str
    writes: str
    cursor: str
    flush: str


@dataclass(frozen=True, slots=True)
class StepStory:
    """A step in words: a sentence a line, and its rows."""

    lines: tuple[str, ...]
    rows: tuple[RowStory, ...]


def explain(plan: StepPlan) -> StepStory:
    """The whole plan in words."""
    return StepStory(tuple(explain_step(plan)), tuple(explain_rows(plan)))


def explain_rows(plan: StepPlan) -> Iterator[RowStory]:
    """Every row of a plan, in order; the padding rows at its end as one."""
    rows = plan.rows
    flush_reasons = _flush_reasons(plan) if plan.decode is not None else []
    for row in range(rows.num_real):
        index = row - (0 if row < plan.num_decodes else plan.num_decodes)
        computed, after = int(rows.computed[row]), int(rows.seq_lens[row])
        count = after - computed
        tokens = f"{computed}..{after - 1} ({count})"
        if row < plan.num_decodes:
            part: Part | None = plan.decode
            story = ("decode", _why_decode(rows, row))
            cursor, flush = _cursor(plan, row), flush_reasons[row]
        else:
            part = plan.prefill
            story = ("prefill", _why_prefill(rows, row))
            cursor, flush = _NONE, "yes: a prefill leaves the state whole"
        if part is None:
            raise ValueError(f"the plan has no part for row {row}")
        yield RowStory(
            str(row),
            *story,
            tokens,
            *_reads(part, index, has_prior=computed > 0),
            _writes(plan, row, index),
            cursor,
            flush,
        )
    if rows.num_real < rows.num_rows:
        yield _padding(plan)


def explain_step(plan: StepPlan) -> list[str]:
    """The step as a whole: strategies, counts, chunks, graph; a sentence each."""
    names = plan.selection.names
    lines = [
        "strategies: " + ", ".join(f"{slot} {name}" for slot, name in names.items()),
        f"{plan.num_decodes} decode rows ({plan.num_decode_tokens} tokens),"
        f" {plan.num_prefills} prefill rows ({plan.num_prefill_tokens} tokens)",
    ]
    if plan.prefill is not None:
        host = plan.prefill.host
        ends = plan.prefill.num_state_writes
        lines.append(
            f"prefill runs in {len(host['seq_idx'])} chunks of up to"
            f" {plan.selection.limits.chunk_size} tokens and {len(host['batch_ptr'])} convolution"
            f" programs; it writes {len(host['write_rows'])} states, {ends} of them at block ends"
            " on the way"
        )
        lines.append("a step with prefills runs under no graph")
    else:
        padded = plan.selection.graph.padded_rows(plan.num_reqs)
        lines.append(
            f"a graph of {padded} rows can run it" if padded is not None else "it runs eagerly"
        )
    return lines


def _padding(plan: StepPlan) -> RowStory:
    first, last = plan.rows.num_real, plan.rows.num_rows - 1
    return RowStory(
        str(first) if first == last else f"{first}..{last}",
        "padding",
        "no token is scheduled: it touches no slot",
        _NONE,
        _NONE,
        _NONE,
        _NONE,
        _cursor(plan, first) if first < plan.num_decodes else _NONE,
        "no",
    )


def _why_decode(rows: Rows, row: int) -> str:
    count = int(rows.query_lens[row])
    if rows.is_prefilling[row]:
        tail = "a prompt tail of one token"
        drafts = "" if count == 1 else f" padded with {count - 1} drafts"
        return f"{tail}{drafts} after {int(rows.computed[row])}: runs as a decode"
    if count == 1:
        return "one token, and none of its prompt is missing"
    return f"{count} tokens, one and {count - 1} drafts to verify"


def _why_prefill(rows: Rows, row: int) -> str:
    computed = int(rows.computed[row])
    if not rows.is_prefilling[row]:
        return "not prefilling, but behind a prefill row or too long for a decode"
    if computed == 0:
        return "the first chunk of its prompt"
    return f"its prompt goes on after {computed} tokens"


def _reads(part: Part, index: int, *, has_prior: bool) -> tuple[str, str]:
    if not has_prior:
        return "none yet", "none yet"
    host = part.host
    return str(int(host["conv_read_slots"][index])), str(int(host["state_read_slots"][index]))


def _writes(plan: StepPlan, row: int, index: int) -> str:
    if plan.prefill is not None and row >= plan.num_decodes:
        host = plan.prefill.host
        slots = host["state_write_slots"][host["write_rows"] == index]
    elif plan.decode is not None:
        slots = np.atleast_1d(plan.decode.host["write_slots"][index])
    else:
        return _NONE
    return ", ".join(map(str, slots.tolist()))


def _cursor(plan: StepPlan, row: int) -> str:
    if plan.decode is None:
        return _NONE
    host = plan.decode.host
    fields = [
        f"{field.name} {_shown(host[field.name][row])}"
        for field in _decode_fields(plan.selection)
        if field.name != "is_flush"
    ]
    if plan.lag is not None and plan.lag[row]:
        fields.append(f"state lags {int(plan.lag[row])}")
    return ", ".join(fields) or _NONE


def _decode_fields(selection: Selection) -> tuple[Any, ...]:
    return tuple(getattr(selection.decode, "fields", ()))


def _shown(value: npt.NDArray[Any]) -> str:
    return str(value.tolist())


def _flush_reasons(plan: StepPlan) -> list[str]:
    """For each decode row whether it writes the whole state, and why."""
    if plan.decode is None:
        return []
    flushes = plan.decode.host.get("is_flush")
    if flushes is None:
        lags = plan.lag is not None
        text = "the decode algorithm's own matter" if lags else "yes: every step writes the state"
        return [text] * plan.num_decodes
    rows = plan.rows.part(0, plan.num_decodes)
    cache = plan.selection.cache
    boundary = cache.last_boundary(rows.seq_lens)
    steps = None if rows.decode_base is None else steps_since_anchor(rows, cache)
    reasons = []
    for row, flush in enumerate(flushes.tolist()):
        if not flush:
            reasons.append("no")
        elif steps is not None and steps[row] < 0:
            reasons.append("yes: a prompt tail, before the anchor")
        elif boundary is not None and boundary[row] == rows.seq_lens[row]:
            reasons.append(f"yes: completes the block that ends at {int(boundary[row])}")
        else:
            reasons.append("yes: the ring is full")
    return reasons
