"""FlashInfer's call and the two kernels beside it, against the recurrence in float64.

The call itself needs a GPU and FlashInfer; the two kernels also run under TRITON_INTERPRET=1.
"""

from __future__ import annotations

import importlib.util
import math
import os

import checkpointing_builders as emulated
import pytest
import torch
from kernel_builders import MixerInputs, draw, generator, ints, same_bits
from ssmcore_kernels.flashinfer import checkpointing

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
needs_flashinfer = pytest.mark.skipif(
    DEVICE != "cuda" or importlib.util.find_spec("flashinfer") is None,
    reason="needs a GPU and FlashInfer",
)
needs_triton = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None
    or (DEVICE != "cuda" and os.environ.get("TRITON_INTERPRET") != "1"),
    reason="needs a GPU or TRITON_INTERPRET=1",
)

L = 16
SHAPE = (64, 64, 128, 8)  # heads, headdim, dstate, groups: one compilation for each state dtype
BOUND = 2e-2
SLOTS = 7
NO_LIMIT = (0.0, math.inf)


class Case:
    """Rows in slots 5, 2 and 4 with a padding row between, after prompts of their own."""

    def __init__(self, state_dtype, steps, limit=NO_LIMIT, seed=0):
        heads, headdim, dstate, groups = SHAPE
        gen = generator(seed)
        self.slots = [5, 0, 2, 4]
        self.ages = [0, 0, 7, 15]  # steps that the rows have decoded before
        count = len(self.slots)
        self.tokens = [
            MixerInputs(gen, count, SHAPE, torch.bfloat16, dt_limit=limit)
            for _ in range(steps + max(self.ages))
        ]
        self.A, self.rest = self.tokens[0].A.to(DEVICE), self.tokens[0].rest
        self.rest = {k: v.to(DEVICE) if k != "dt_limit" else v for k, v in self.rest.items()}
        self.state = torch.full((SLOTS, heads, headdim, dstate), math.nan, dtype=state_dtype)
        for slot in self.slots:
            if slot:
                self.state[slot] = draw(gen, heads, headdim, dstate).to(state_dtype)
        self.state = self.state.to(DEVICE)
        self.whole = self.state.double()
        entries, like = L + 1, {"dtype": torch.bfloat16, "device": DEVICE}
        self.rings = {
            "ring_x": torch.full((SLOTS, heads, entries, headdim), math.nan, **like),
            "ring_dt": torch.full((SLOTS, heads, entries), math.nan, device=DEVICE),
            "ring_B": torch.full((SLOTS, groups, entries, dstate), math.nan, **like),
        }
        self.scratch = checkpointing.make_scratch(
            count + 3, heads, L, torch.bfloat16, torch.device(DEVICE)
        )

    def cursors(self, ages):
        """ring_start and pending of every slot, for rows that have decoded `ages` tokens."""
        start, pending = torch.zeros(2, SLOTS, dtype=torch.int32, device=DEVICE)
        for slot, age in zip(self.slots, ages, strict=True):
            before = max(age, 1) - 1
            start[slot] = before // L * L % (L + 1)
            pending[slot] = before % L + 1 if age else 0
        return start, pending

    def inputs(self, index):
        one = self.tokens[index]
        return {name: getattr(one, name).to(DEVICE) for name in ("x", "dt", "B", "C")}

    def call(self, tokens, slots, ages):
        start, pending = self.cursors(ages)
        out = torch.full_like(tokens["x"], 7.0, memory_format=torch.contiguous_format)
        return checkpointing.checkpointing_state_update(
            tokens["x"],
            tokens["dt"],
            self.A,
            tokens["B"],
            tokens["C"],
            **self.rest,
            state=self.state,
            **self.rings,
            ring_start=start,
            pending=pending,
            slots=ints(slots).to(DEVICE),
            scratch=self.scratch,
            out=out,
        )

    def want(self, tokens, row):
        """One token of a row by the recurrence, in float64; advances its whole state."""
        x, dt, B, C = (tokens[name][row].double() for name in ("x", "dt", "B", "C"))
        D, bias = self.rest["D"].double(), self.rest["dt_bias"].double()
        dt = torch.nn.functional.softplus(dt + bias).clamp(*self.rest["dt_limit"])
        group = torch.arange(len(dt), device=DEVICE) // (len(dt) // len(B))
        slot = self.slots[row]
        added = (dt[:, None] * x)[:, :, None] * B[group][:, None]
        decay = torch.exp(dt * self.A.double())[:, None, None]
        self.whole[slot] = decay * self.whole[slot] + added
        return (self.whole[slot] * C[group][:, None]).sum(-1) + D[:, None] * x

    def lives(self, steps):
        """Every row alone up to its age, then all together; yields ages, outputs and wanted."""
        index = 0
        for row, age in enumerate(self.ages):
            for before in range(age):
                tokens = self.inputs(before)
                slots = [slot if at == row else 0 for at, slot in enumerate(self.slots)]
                ages = [before if at == row else 0 for at in range(len(self.slots))]
                self.call(tokens, slots, ages)
                self.want(tokens, row)
        for index in range(steps):
            tokens = self.inputs(max(self.ages) + index)
            ages = [age + index for age in self.ages]
            got = self.call(tokens, self.slots, ages)
            want = {row: self.want(tokens, row) for row, slot in enumerate(self.slots) if slot}
            yield ages, got, want


def relative(got, want):
    return float((got.double() - want).norm() / want.norm())


@needs_flashinfer
@pytest.mark.parametrize("state_dtype", [torch.float32, torch.bfloat16])
def test_full_cycles_stay_within_the_bound(state_dtype):
    case, worst = Case(state_dtype, 3 * L), 0.0
    for ages, got, want in case.lives(3 * L):
        for row, y in want.items():
            error = relative(got[row], y)
            worst = max(worst, error)
            assert error < BOUND, f"row {row} after {ages[row]} steps: {error:.2e}"
        assert got[1].eq(7.0).all(), "a padding row's output is left alone"
        assert case.state[[0, 1, 3, 6]].isnan().all(), "other slots are left alone"
        assert case.rings["ring_x"][[0, 1, 3, 6]].isnan().all()
    print(f"worst relative error, {state_dtype} states: {worst:.2e}")


@needs_flashinfer
def test_a_flush_writes_the_state_without_the_newest_token():
    case = Case(torch.float32, L + 2)
    before = case.state[5].clone()
    wholes = []
    for ages, _, _ in case.lives(L + 2):
        wholes.append(case.whole[5].clone())
        if ages[0] < L:
            assert same_bits(case.state[5], before)
        else:
            assert relative(case.state[5], wholes[L - 1]) < BOUND


@needs_flashinfer
def test_results_do_not_depend_on_neighbours_and_are_the_same_each_time():
    together = [got[3] for _, got, _ in Case(torch.float32, 4).lives(4)]
    again = [got[3] for _, got, _ in Case(torch.float32, 4).lives(4)]
    assert all(same_bits(a, b) for a, b in zip(together, again, strict=True))
    alone = Case(torch.float32, 4)
    alone.slots = [0, 0, 0, 4]
    alone.ages = [0, 0, 0, 15]
    for (_, got, _), want in zip(alone.lives(4), together, strict=True):
        assert relative(got[3], want.double()) < 1e-2


@needs_flashinfer
def test_runs_in_a_captured_graph():
    case = Case(torch.float32, 1)
    tokens, ages = case.inputs(0), [0] * 4
    want = case.call(tokens, case.slots, ages).clone()
    start, pending = case.cursors(ages)
    slots, out = ints(case.slots).to(DEVICE), torch.zeros_like(want)
    names = ("x", "dt", "B", "C")

    def call():
        x, dt, B, C = (tokens[name] for name in names)
        checkpointing.checkpointing_state_update(
            x,
            dt,
            case.A,
            B,
            C,
            **case.rest,
            state=case.state,
            **case.rings,
            ring_start=start,
            pending=pending,
            slots=slots,
            scratch=case.scratch,
            out=out,
        )

    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    out.zero_()
    graph.replay()
    torch.cuda.synchronize()
    for row, slot in enumerate(case.slots):
        assert same_bits(out[row], want[row] if slot else torch.zeros_like(out[row]))


def ring_case(seed=0, heads=10):
    """Three rows' slots with rings of 5 entries, in float32, and a padding row."""
    gen, headdim, dstate, groups, entries = generator(seed), 3, 5, 2, 5
    pools = {
        "state": draw(gen, 6, heads, headdim, dstate, dtype=torch.float32),
        "ring_x": draw(gen, 6, heads, entries, headdim, dtype=torch.float32),
        "ring_dt": draw(gen, 6, heads, entries, dtype=torch.float32).abs(),
        "ring_B": draw(gen, 6, groups, entries, dstate, dtype=torch.float32),
    }
    for pool in pools.values():
        pool[0] = math.nan
    return pools, -torch.exp(draw(gen, heads, dtype=torch.float32))


def on_device(values):
    return {name: value.to(DEVICE) for name, value in values.items()}


@needs_triton
def test_settling_folds_the_newest_entries_and_clears_padding_rows():
    from ssmcore_kernels.flashinfer.settle import settle_rows

    pools, A = ring_case()
    rows = {
        "write_slots": ints([3, 0, 5, 1]),
        "ring_start": ints([0, 0, 4, 3]),
        "pending": ints([0, 0, 3, 4]),
        "fold_count": ints([1, 0, 4, 0]),
    }
    out = torch.full((4, len(A), 3), 7.0)
    there, there_out = on_device(pools), out.to(DEVICE)
    settle_rows(A.to(DEVICE), **there, **on_device(rows), out=there_out)
    before = {name: pool.clone() for name, pool in pools.items()}
    emulated.settle_rows(A, **pools, **rows, out=out)
    assert same_bits(there_out.cpu(), out)
    assert not same_bits(pools["state"][5], before["state"][5])
    torch.testing.assert_close(there["state"].cpu(), pools["state"], equal_nan=True)
    for name in ("ring_x", "ring_dt", "ring_B"):
        assert same_bits(there[name].cpu(), before[name])
    assert same_bits(there["state"][[0, 1, 2, 4]].cpu(), before["state"][[0, 1, 2, 4]])


@needs_triton
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_carrying_copies_only_states_of_rows_that_begin(dtype):
    from ssmcore_kernels.flashinfer.settle import carry_states

    state = ring_case()[0]["state"].to(dtype)
    rows = {
        "state_read_slots": ints([3, 0, 1, 2]),
        "write_slots": ints([5, 0, 4, 2]),
        "pending": ints([0, 0, 2, 0]),
    }
    there = state.to(DEVICE)
    carry_states(state=there, **on_device(rows))
    want = state.clone()
    want[5] = state[3]
    assert same_bits(there.cpu(), want)


SCRATCH = checkpointing.Scratch(
    *[torch.empty(0)] * 3, dt=torch.empty(4, SHAPE[0]), zero=torch.zeros(())
)


def arguments(**more):
    """A call's arguments on a CPU, sound but for the device; `more` replaces some."""
    heads, headdim, dstate, groups = SHAPE
    inputs = MixerInputs(generator(), 2, SHAPE, torch.bfloat16)
    like = {"dtype": torch.bfloat16}
    given = {
        **{name: getattr(inputs, name) for name in ("x", "dt", "A", "B", "C")},
        **inputs.rest,
        "state": torch.zeros(3, heads, headdim, dstate),
        "ring_x": torch.zeros(3, heads, 5, headdim, **like),
        "ring_dt": torch.zeros(3, heads, 5),
        "ring_B": torch.zeros(3, groups, 5, dstate, **like),
        "ring_start": ints([0, 0, 0]),
        "pending": ints([0, 0, 0]),
        "slots": ints([1, 2]),
        "scratch": SCRATCH,
        "out": torch.zeros(2, heads, headdim, **like),
    }
    return {**given, **more}


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("x", torch.zeros(2, 64, 64)),
        ("x", torch.zeros(2, 64 * 64 + 1, dtype=torch.bfloat16)[:, 1:].view(2, 64, 64)),
        ("state", torch.zeros(3, 64, 64, 128, dtype=torch.float16)),
        ("state", torch.zeros(3, 64, 128, 64).transpose(2, 3)),
        ("ring_x", torch.zeros(3, 5, 64, 64, dtype=torch.bfloat16)),
        ("ring_dt", torch.zeros(3, 5, 64)),
        ("ring_B", torch.zeros(3, 8, 4, 128, dtype=torch.bfloat16)),
        ("pending", torch.zeros(2, dtype=torch.int32)),
        ("slots", torch.zeros(2, dtype=torch.int64)),
        ("D", torch.zeros(64, dtype=torch.float64)),
    ],
)
def test_an_argument_it_cannot_take_is_named(name, value, monkeypatch):
    monkeypatch.setattr(checkpointing, "_call", lambda *args, **kwargs: None)
    checkpointing.checkpointing_state_update(**arguments())
    with pytest.raises(ValueError, match=f"^{name}:"):
        checkpointing.checkpointing_state_update(**arguments(**{name: value}))


def test_a_limited_dt_is_made_before_the_call(monkeypatch):
    from ssmcore_kernels.reference.time_step import time_step

    seen = {}

    def call(*args, **kwargs):
        seen.update(dt=args[7][:, 0, :, 0].clone(), **kwargs)

    monkeypatch.setattr(checkpointing, "_call", call)
    given = arguments(dt_limit=(0.1, 0.5))
    checkpointing.checkpointing_state_update(**given)
    want = time_step(given["dt"], given["dt_bias"], (0.1, 0.5))
    torch.testing.assert_close(seen["dt"], want)
    assert (seen["dt_bias"], seen["dt_softplus"]) == (None, False)
