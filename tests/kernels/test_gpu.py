"""Reference kernels on a GPU: the CPU's results, no wait for the device, graph capture."""

from __future__ import annotations

import pytest
import torch
from kernel_builders import (
    MixerInputs,
    bools,
    chunk_metadata,
    draw,
    generator,
    ints,
    offsets,
    poisoned,
    same_bits,
)
from ssmcore_kernels.reference.conv import causal_conv1d_prefill, causal_conv1d_update
from ssmcore_kernels.reference.replay import replay_state_update
from ssmcore_kernels.reference.ssd import ssd_prefill
from ssmcore_kernels.reference.state_update import selective_state_update

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
SHAPE = (6, 8, 16, 2)
READS, WRITES = [1, 0, 2, 3], [4, 0, 2, 6]
DRAFT_WRITES = [[4, 5], [0, 0], [2, 7], [6, 8]]


def step_case(dtype, query_start_loc=None):
    inputs = MixerInputs(generator(), 6, SHAPE, dtype)
    tokens = 6 if query_start_loc else 4
    named = {name: getattr(inputs, name)[:tokens] for name in ("x", "dt", "B", "C")}
    state = poisoned(9, *SHAPE[:3], dtype=dtype, but=[1, 2, 3])
    slots = {"read_slots": ints(READS), "write_slots": ints(WRITES)}
    if query_start_loc:
        slots["write_slots"] = torch.stack([ints(row) for row in DRAFT_WRITES])
        slots["query_start_loc"] = ints(query_start_loc)
    return {**named, "A": inputs.A, **inputs.rest, "state": state, **slots}


def replay_case(dtype):
    case = step_case(dtype)
    gen, L = generator(3), 4
    case["state_read_slots"] = case.pop("read_slots")
    rings = {
        "ring_x": draw(gen, 9, L, *SHAPE[:2], dtype=dtype),
        "ring_dt": draw(gen, 9, L, SHAPE[0], dtype=dtype).abs(),
        "ring_B": draw(gen, 9, L, SHAPE[3], SHAPE[2], dtype=dtype),
    }
    for ring in rings.values():
        ring[:, 3:] = float("nan")
        ring[0] = float("nan")
    cursors = {"write_pos": ints([3, 0, 0, 2]), "is_flush": bools([True, False, True, False])}
    return {**case, **rings, **cursors}


def conv_case(dtype, query_start_loc=None):
    gen = generator()
    tokens = 6 if query_start_loc else 4
    rest = {"weight": draw(gen, 10, 4, dtype=dtype), "bias": draw(gen, 10, dtype=dtype)}
    state = poisoned(9, 3, 10, dtype=dtype, but=[1, 2, 3])
    slots = {"read_slots": ints(READS), "write_slots": ints(WRITES)}
    if query_start_loc:
        slots["write_slots"] = torch.stack([ints(row) for row in DRAFT_WRITES])
        slots["query_start_loc"] = ints(query_start_loc)
    return {"x": draw(gen, tokens, 10, dtype=dtype), **rest, "conv_state": state, **slots}


def prefill_case(dtype):
    lengths = [5, 70, 9]
    inputs = MixerInputs(generator(), sum(lengths), SHAPE, dtype)
    chunks, last = chunk_metadata(lengths, [3, 0, 7], 16)
    return {
        **{name: getattr(inputs, name) for name in ("x", "dt", "A", "B", "C")},
        **inputs.rest,
        **chunks,
        "state": poisoned(9, *SHAPE[:3], dtype=dtype, but=[1, 2]),
        "read_slots": ints([1, 8, 2]),
        "has_initial_states": bools([True, False, True]),
        "write_chunks": ints([2, *last]),
        "write_slots": ints([4, 5, 6, 2]),
        "max_chunk_len": 16,
    }


def conv_prefill_case(dtype):
    case = conv_case(dtype)
    lengths = [1, 2, 9]
    loc = offsets(lengths)
    return {
        **case,
        "x": draw(generator(), loc[-1], 10, dtype=dtype),
        "query_start_loc": ints(loc),
        "read_slots": ints([1, 8, 2]),
        "has_initial_states": bools([True, False, True]),
        "write_rows": ints([2, 0, 1, 2]),
        "write_ends": ints([4, 1, 3, loc[-1]]),
        "write_slots": ints([4, 5, 6, 2]),
    }


def drafts(case):
    return lambda dtype: case(dtype, [0, 2, 2, 3, 5])


DECODE = [
    (selective_state_update, step_case),
    (selective_state_update, drafts(step_case)),
    (causal_conv1d_update, conv_case),
    (causal_conv1d_update, drafts(conv_case)),
    (replay_state_update, replay_case),
]
PREFILL = [(ssd_prefill, prefill_case), (causal_conv1d_prefill, conv_prefill_case)]
POOLS = ("state", "conv_state", "ring_x", "ring_dt", "ring_B")


def on_gpu(case):
    return {name: v.cuda() if isinstance(v, torch.Tensor) else v for name, v in case.items()}


def assert_same(got, want, dtype):
    close = {torch.float64: 1e-12, torch.float32: 1e-5}[dtype]
    torch.testing.assert_close(got.cpu(), want, rtol=close, atol=close, equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize(("kernel", "build"), [*DECODE, *PREFILL])
def test_a_gpu_gives_what_a_cpu_gives_and_is_never_waited_for(kernel, build, dtype):
    case = build(dtype)
    there = on_gpu(case)
    null = {name: there[name][0].clone() for name in POOLS if name in there}
    torch.cuda.set_sync_debug_mode("error")
    try:
        got = kernel(**there)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert_same(got, kernel(**case), dtype)
    for name in POOLS:
        if name in case:
            assert_same(there[name], case[name], dtype)
            assert same_bits(there[name][0], null[name])


@pytest.mark.parametrize(("kernel", "build"), DECODE)
def test_decode_kernels_run_in_a_captured_graph(kernel, build):
    case, there = build(torch.float32), on_gpu(build(torch.float32))
    start = {name: there[name].clone() for name in POOLS if name in there}
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        kernel(**there)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = kernel(**there)
    for _ in range(2):
        for name, pool in start.items():
            there[name].copy_(pool)
        graph.replay()
    torch.cuda.synchronize()
    assert_same(out, kernel(**case), torch.float32)
    for name in start:
        assert_same(there[name], case[name], torch.float32)
