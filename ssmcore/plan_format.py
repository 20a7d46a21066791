"""The printed form of a plan: plain lists, a part that does not apply is None."""

from __future__ import annotations

from typing import Any

from ssmcore.plan import DecodePlan, PrefillPlan, StepPlan

_PREFILL_CHUNKS = ("cu_seqlens", "seq_idx", "last_indices")
_PREFILL_CONV = ("batch_ptr", "token_chunk_offset")
_PREFILL_WRITES = {
    "write_rows": "rows",
    "write_ends": "ends",
    "write_chunks": "chunks",
    "state_write_slots": "slots",
}


def plan_to_dict(plan: StepPlan) -> dict[str, Any]:
    """Every field of a plan as JSON values."""
    return {
        "num_reqs": plan.num_reqs,
        "num_decodes": plan.num_decodes,
        "num_decode_tokens": plan.num_decode_tokens,
        "num_prefills": plan.num_prefills,
        "num_prefill_tokens": plan.num_prefill_tokens,
        "decode": None if plan.decode is None else _decode(plan.decode),
        "prefill": None if plan.prefill is None else _prefill(plan.prefill),
        "cache": plan.selection.cache.describe(
            plan.rows, plan.num_decodes, {} if plan.cache is None else plan.cache.host
        ),
    }


def _decode(part: DecodePlan) -> dict[str, Any]:
    fields: dict[str, Any] = {"query_start_loc": None, "num_accepted_tokens": None}
    fields.update((name, values.tolist()) for name, values in part.host.items())
    return fields


def _prefill(part: PrefillPlan) -> dict[str, Any]:
    host = part.host
    fields: dict[str, Any] = {"num_computed_tokens": None}
    grouped = {*_PREFILL_CHUNKS, *_PREFILL_CONV, *_PREFILL_WRITES}
    fields.update((name, values.tolist()) for name, values in host.items() if name not in grouped)
    fields["num_state_writes"] = part.num_state_writes
    fields["chunks"] = {name: host[name].tolist() for name in _PREFILL_CHUNKS}
    fields["conv"] = {name: host[name].tolist() for name in _PREFILL_CONV}
    fields["writes"] = {short: host[name].tolist() for name, short in _PREFILL_WRITES.items()}
    return fields
