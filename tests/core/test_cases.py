"""Whatever a case line holds, it ends in one plan or one clear error."""

from __future__ import annotations

import json
import tracemalloc
from typing import Any

import pytest

from ssmcore.cases import Planner
from ssmcore.jsonlines import MAX_LINE_BYTES, Line, dump_line

STEP: dict[str, Any] = {
    "query_start_loc": [0, 1],
    "seq_lens": [5],
    "is_prefilling": [False],
    "block_table": [[1]],
}
MOST = 2**31 - 1


@pytest.fixture(scope="module")
def planner() -> Planner:
    return Planner.with_defaults()


def answer(planner: Planner, data: bytes | dict[str, Any]) -> dict[str, Any]:
    """The answer as a reader of strict JSON sees it."""
    raw = data if isinstance(data, bytes) else json.dumps(data).encode()
    text = dump_line(planner.answer(Line(7, raw)))
    assert "\n" not in text

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is no JSON")

    found: dict[str, Any] = json.loads(text, parse_constant=refuse)
    assert found.keys() in ({"id", "plan"}, {"id", "error"})
    return found


def case(settings: dict[str, Any] | None = None, **changes: Any) -> dict[str, Any]:
    return {"id": "x", "settings": settings or {}, "step": {**STEP, **changes}}


def test_a_good_case_is_planned_with_defaults(planner):
    found = answer(planner, {"step": STEP})
    assert found["id"] is None
    assert found["plan"]["num_decodes"] == 1


@pytest.mark.parametrize("name", ["a", 7, None, {"a": [1.5]}, "\ud800", ""])
def test_the_id_is_echoed(planner, name):
    assert answer(planner, {"id": name, "step": STEP})["id"] == name
    assert answer(planner, {"id": name})["id"] == name


def test_a_recorded_plan_beside_the_step_is_not_read(planner):
    assert "plan" in answer(planner, {"step": STEP, "plan": {"num_reqs": 99}})


@pytest.mark.parametrize(
    ("data", "code", "message"),
    [
        (b"", "json", "line 7: empty"),
        (b'{"id": 1, "step": {"seq_lens": [1', "json", "line 7: not JSON"),
        (b"\xff\xfe", "json", "line 7: not UTF-8"),
        (b'{"step": NaN}', "json", "NaN is no JSON number"),
        (b'{"step": 1e999}', "json", "beyond a double's range"),
        (b'{"step": ' + b"9" * 5000 + b"}", "json", "too many digits"),
        (b"[" * 200_000, "json", "nested too deeply"),
        (b'{"step": {}, "step": {}}', "json", "'step' is given twice"),
        (b"[]", "type", "must be a JSON object"),
        (b"null", "type", "must be a JSON object"),
        (b"{}", "key", "lacks 'step'"),
        ({"step": STEP, "setings": {}}, "key", "unknown key 'setings'"),
        ({"step": STEP, "settings": None}, "type", "settings must be an object"),
        ({"step": [STEP]}, "type", "step must be an object"),
        ({"step": {**STEP, "seqlens": []}}, "key", "unknown key 'seqlens'"),
        ({"step": {}}, "key", "step lacks 'query_start_loc'"),
    ],
)
def test_a_line_that_is_no_case_is_refused(planner, data, code, message):
    error = answer(planner, data)["error"]
    assert error["code"] == code
    assert message in error["message"]
    assert error["row"] is None


def test_a_line_too_long_to_keep_is_refused(planner):
    error = planner.answer(Line(3, None))["error"]
    assert error["message"] == f"line 3: the line is longer than {MAX_LINE_BYTES} bytes"


@pytest.mark.parametrize(
    ("settings", "code", "message"),
    [
        ({"engine": 5}, "settings", "engine"),
        ({"engin": {}}, "unknown_option", "engine"),
        ({"engine": {"max_seqs": 5}}, "unknown_option", "max_num_seqs"),
        ({"engine": {"max_num_seqs": "5"}}, "settings", "max_num_seqs"),
        ({"engine": {"max_num_seqs": True}}, "settings", "max_num_seqs"),
        ({"engine": {"max_num_seqs": 2**31}}, "settings", "max_num_seqs"),
        ({"engine": {"max_num_seqs": 10**4000}}, "settings", "max_num_seqs"),
        ({"engine": {"max_model_len": -1}}, "settings", "max_model_len"),
        ({"model": {"chunk_size": 0}}, "settings", "chunk_size"),
        ({"model": {"chunk_size": 8.0}}, "settings", "chunk_size"),
        ({"cache": {"name": "align", "block_size": 0}}, "settings", "block_size"),
        ({"cache": {"name": "none", "block_size": 8}}, "unknown_option", "block_size"),
        ({"cache": {"name": "aligned"}}, "unknown_strategy", "align"),
        ({"cache": {"name": ["all"]}}, "settings", "cache.name"),
        ({"decode": {"name": "replay-torch", "buffer_len": 65}}, "settings", "buffer_len"),
        (
            {"decode": {"name": "replay-torch"}, "engine": {"num_spec_tokens": 1}},
            "combination",
            "num_spec_tokens",
        ),
    ],
)
def test_bad_settings_are_refused_by_name(planner, settings, code, message):
    found = answer(planner, case(settings))
    assert found["id"] == "x"
    assert found["error"]["code"] == code
    assert message in found["error"]["message"]


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({"seq_lens": [1.0]}, "type"),
        ({"seq_lens": ["5"]}, "type"),
        ({"seq_lens": [True]}, "type"),
        ({"seq_lens": "5"}, "type"),
        ({"seq_lens": {"0": 5}}, "type"),
        ({"seq_lens": [2**63]}, "type"),
        ({"seq_lens": [-(2**63) - 1]}, "type"),
        ({"seq_lens": [10**4000]}, "type"),
        ({"seq_lens": [2**63 - 1]}, "max_model_len"),
        ({"seq_lens": [-(2**63)]}, "seq_len"),
        ({"seq_lens": [-1]}, "seq_len"),
        ({"is_prefilling": [0]}, "type"),
        ({"query_start_loc": [0]}, "length"),
        ({"query_start_loc": [0, 0]}, "empty"),
        ({"query_start_loc": [-(2**63), 2**63 - 1]}, "query_start_loc"),
        ({"query_start_loc": [0, 2**63 - 1]}, "too_many_tokens"),
        ({"block_table": []}, "length"),
        ({"block_table": [[]]}, "block_table_width"),
        ({"block_table": [1]}, "type"),
        ({"block_table": [[[1]]]}, "type"),
        ({"block_table": [[0]]}, "null_slot"),
        ({"block_table": [[-1]]}, "slot_range"),
        ({"block_table": [[2**31]]}, "slot_range"),
        ({"block_table": [[2**63 - 1]]}, "slot_range"),
        ({"num_accepted_tokens": [2]}, "num_accepted_tokens"),
        ({"num_draft_tokens": [1]}, "num_draft_tokens"),
        ({"decode_base": [-1]}, "decode_base"),
        ({"prev_last_scheduled_block": [2**63 - 1]}, "prev_last_scheduled_block"),
    ],
)
def test_a_bad_step_is_refused_with_its_code(planner, changes, code):
    assert answer(planner, case(**changes))["error"]["code"] == code


def test_lengths_that_would_wrap_around_are_refused(planner):
    settings = {"engine": {"max_model_len": 10}}
    changes = {"query_start_loc": [0, 12], "seq_lens": [-(2**63) + 11]}
    error = answer(planner, case(settings, **changes))["error"]
    assert (error["code"], error["row"]) == ("seq_len", 0)


def test_an_offset_that_would_wrap_around_is_refused(planner):
    changes = {
        "query_start_loc": [0, 2**63 - 1, -(2**63)],
        "seq_lens": [5, 5],
        "is_prefilling": [False] * 2,
        "block_table": [[1], [2]],
    }
    assert "error" in answer(planner, case(**changes))


@pytest.mark.parametrize(
    "settings",
    [
        {"engine": {"max_num_seqs": MOST, "max_model_len": MOST, "max_num_batched_tokens": MOST}},
        {"engine": {"max_num_seqs": MOST}, "graph": {"name": "full-decode"}},
        {"engine": {"max_model_len": MOST}, "cache": {"name": "all", "block_size": 1}},
        {"model": {"chunk_size": 1}, "engine": {"max_num_batched_tokens": MOST}},
        {"model": {"chunk_size": MOST}, "cache": {"name": "align", "block_size": MOST}},
    ],
)
def test_the_largest_settings_take_no_memory_of_their_size(planner, settings):
    tracemalloc.start()
    try:
        changes = {"query_start_loc": [0, 5], "is_prefilling": [True]}
        found = answer(planner, case(settings, **changes, block_table=[[1, 2, 3, 4, 5]]))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert "plan" in found
    assert peak < 300 * 2**20  # reserved by the arena, and only what is used is ever touched


@pytest.mark.parametrize("tokens", [2**24 + 2**23, MOST])
def test_a_step_too_large_to_print_is_refused_at_once(planner, tokens):
    settings = {"engine": {"max_model_len": MOST}}
    changes = {"query_start_loc": [0, tokens], "seq_lens": [tokens], "is_prefilling": [True]}
    assert answer(planner, case(settings, **changes))["error"]["code"] == "too_many_tokens"


def test_settings_of_a_case_stand_below_overrides_and_above_a_file(tmp_path):
    path = tmp_path / "base.toml"
    path.write_text(
        '[decode]\nname = "replay-torch"\nbuffer_len = 4\n[engine]\nmax_model_len = 8\n'
    )
    planner = Planner.with_defaults(path, ["engine.num_spec_tokens=1"])
    error = answer(planner, case(decode_base=[5]))["error"]
    assert error["code"] == "combination"
    baseline = {"decode": {"name": "baseline"}}
    assert "plan" in answer(planner, case(baseline, block_table=[[1, 2]]))
    too_long = answer(planner, case(baseline, block_table=[[1, 2]], seq_lens=[9]))
    assert too_long["error"]["code"] == "max_model_len"


def test_a_fault_of_our_own_is_an_error_line_too():
    def broken(settings):
        raise ZeroDivisionError("oops")

    error = Planner(broken).answer(Line(1, json.dumps({"id": 1, "step": STEP}).encode()))["error"]
    assert error["code"] == "internal"
    assert "ZeroDivisionError: oops" in error["message"]
