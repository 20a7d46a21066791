"""Replay steps against the recurrence in float64: the torch reference, and the Triton kernel under
the interpreter or on a GPU.
"""

from __future__ import annotations

import importlib.util
import os

import pytest
import torch
from ssmcore_kernels.reference import replay as reference

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
RUNS_TRITON = importlib.util.find_spec("triton") is not None and (
    DEVICE == "cuda" or os.environ.get("TRITON_INTERPRET") == "1"
)


@pytest.fixture(
    params=[
        "host",
        "device",
        pytest.param(
            "triton",
            marks=pytest.mark.skipif(not RUNS_TRITON, reason="needs a GPU or TRITON_INTERPRET=1"),
        ),
    ]
)
def replay_state_update(request, monkeypatch):
    """The form for CPUs, the one that never looks at a value, and the Triton kernel."""
    if request.param == "triton":
        from ssmcore_kernels.triton.replay import replay_state_update

        return replay_state_update
    on_host = request.param == "host" and DEVICE == "cpu"
    monkeypatch.setattr(reference, "is_host", lambda tensor: on_host)
    return reference.replay_state_update


NAN = float("nan")


def recurrence_step(state, x, dt, A, B, C, D, dt_bias, limit):
    """One token of one row in float64: returns y and the new state."""
    dt = torch.nn.functional.softplus(dt.double() + dt_bias.double()).clamp(*limit)
    group = torch.arange(len(A), device=A.device) // (len(A) // B.shape[0])
    state = torch.exp(dt * A.double())[:, None, None] * state + (
        dt[:, None, None] * x.double()[:, :, None] * B.double()[group][:, None, :]
    )
    y = (state * C.double()[group][:, None, :]).sum(-1) + D.double()[:, None] * x.double()
    return y, state


def run(
    replay_state_update,
    steps,
    L,
    *,
    heads,
    headdim,
    dstate,
    groups,
    dtype,
    state_dtype,
    limit=(0.0, float("inf")),
    scale=1.0,
):
    """A row that decodes `steps` tokens in slot 2, with a padding row beside it."""
    gen = torch.Generator().manual_seed(0)

    def draw(*shape, dtype=torch.float32):
        return torch.randn(shape, generator=gen).to(dtype).to(DEVICE)

    A = -scale * torch.exp(draw(heads))
    D, bias = draw(heads), draw(heads)
    state = torch.full((4, heads, headdim, dstate), NAN, dtype=state_dtype, device=DEVICE)
    start = draw(heads, headdim, dstate)
    state[2] = start.to(state_dtype)
    want_state = state[2].double()
    ring_x = torch.full((4, L, heads, headdim), NAN, dtype=dtype, device=DEVICE)
    ring_dt = torch.full((4, L, heads), NAN, device=DEVICE)
    ring_b = torch.full((4, L, groups, dstate), NAN, dtype=dtype, device=DEVICE)
    ints = {"dtype": torch.int32, "device": DEVICE}
    slots = torch.tensor([2, 0], **ints)
    errors = []
    for step in range(steps):
        x, dt = draw(2, heads, headdim, dtype=dtype), (scale * draw(2, heads)).to(dtype)
        B, C = draw(2, groups, dstate, dtype=dtype), draw(2, groups, dstate, dtype=dtype)
        out = torch.full((2, heads, headdim), NAN, dtype=dtype, device=DEVICE)
        replay_state_update(
            x,
            dt,
            A,
            B,
            C,
            D=D,
            dt_bias=bias,
            dt_limit=limit,
            state=state,
            ring_x=ring_x,
            ring_dt=ring_dt,
            ring_B=ring_b,
            state_read_slots=slots,
            write_slots=slots,
            write_pos=torch.tensor([step % L, 0], **ints),
            is_flush=torch.tensor([step % L == L - 1, False], device=DEVICE),
            out=out,
        )
        y, want_state = recurrence_step(want_state, x[0], dt[0], A, B[0], C[0], D, bias, limit)
        assert not out[1].any(), "a padding row gives zero"
        errors.append((out[0].double() - y).norm() / y.norm())
        if step % L == L - 1:
            errors.append((state[2].double() - want_state).norm() / want_state.norm())
        whole = reference.materialize_state(
            A,
            state=state,
            ring_x=ring_x,
            ring_dt=ring_dt,
            ring_B=ring_b,
            state_read_slots=slots[:1],
            ring_slots=slots[:1],
            pending=torch.tensor([(step + 1) % L], **ints),
        )
        errors.append((whole[0].double() - want_state).norm() / want_state.norm())
        for tensor in (state, ring_x, ring_dt, ring_b):
            assert tensor[[0, 1, 3]].isnan().all(), "no other slot is touched"
    return float(torch.stack(errors).max())  # NaN travels through max


@pytest.mark.parametrize("L", [1, 2, 3, 16, 64])
def test_outputs_and_states_equal_the_recurrence_in_float32(replay_state_update, L):
    worst = run(
        replay_state_update,
        2 * L + 1,
        L,
        heads=2,
        headdim=16,
        dstate=16,
        groups=1,
        dtype=torch.float32,
        state_dtype=torch.float32,
    )
    assert worst < 1e-5


@pytest.mark.parametrize(
    ("heads", "headdim", "dstate", "groups"), [(6, 8, 16, 3), (3, 5, 24, 1), (4, 80, 16, 4)]
)
def test_odd_shapes(replay_state_update, heads, headdim, dstate, groups):
    worst = run(
        replay_state_update,
        5,
        4,
        heads=heads,
        headdim=headdim,
        dstate=dstate,
        groups=groups,
        dtype=torch.float32,
        state_dtype=torch.float32,
        limit=(0.1, 0.9),
    )
    assert worst < 1e-5


@pytest.mark.parametrize("state_dtype", [torch.float16, torch.bfloat16])
def test_a_16_bit_state_is_rounded_at_flushes_only(replay_state_update, state_dtype):
    worst = run(
        replay_state_update,
        9,
        4,
        heads=2,
        headdim=16,
        dstate=16,
        groups=1,
        dtype=torch.float32,
        state_dtype=state_dtype,
    )
    assert worst < (2e-3 if state_dtype == torch.float16 else 1.5e-2)


def test_a_block_border_reads_one_slot_and_writes_another(replay_state_update):
    heads, headdim, dstate = 2, 8, 16
    gen = torch.Generator().manual_seed(1)
    state = torch.full((4, heads, headdim, dstate), NAN, device=DEVICE)
    state[1] = torch.randn(heads, headdim, dstate, generator=gen).to(DEVICE)
    before = state[1].clone()
    ring = [
        torch.full(shape, NAN, device=DEVICE)
        for shape in ((4, 2, heads, headdim), (4, 2, heads), (4, 2, 1, dstate))
    ]
    one = torch.ones(heads, device=DEVICE)
    want = before.double()
    for step in range(2):
        x, dt, B, C = (
            torch.randn(shape, generator=gen).to(DEVICE)
            for shape in ((1, heads, headdim), (1, heads), (1, 1, dstate), (1, 1, dstate))
        )
        out = replay_state_update(
            x,
            dt,
            -one,
            B,
            C,
            D=one,
            dt_bias=one,
            dt_limit=(0.0, float("inf")),
            state=state,
            ring_x=ring[0],
            ring_dt=ring[1],
            ring_B=ring[2],
            state_read_slots=torch.tensor([1], dtype=torch.int32, device=DEVICE),
            write_slots=torch.tensor([3], dtype=torch.int32, device=DEVICE),
            write_pos=torch.tensor([step], dtype=torch.int32, device=DEVICE),
            is_flush=torch.tensor([step == 1], device=DEVICE),
        )
        y, want = recurrence_step(
            want, x[0], dt[0], -one, B[0], C[0], one, one, (0.0, float("inf"))
        )
        torch.testing.assert_close(out[0].double(), y, rtol=1e-5, atol=1e-5)
    assert state[1].equal(before), "the shared slot is only read"
    torch.testing.assert_close(state[3].double(), want, rtol=1e-5, atol=1e-5)
    assert state[[0, 2]].isnan().all()


def schedule(base, computed, block, L):
    """Read column, write column, cursor and flush of a row of a step with cache blocks."""
    base = max(base, computed // block * block)
    since = computed - base
    pos, flush = (0, True) if since < 0 else (since % L, since % L == L - 1)
    flush = flush or (computed + 1) % block == 0
    return max(0, (computed - pos - 1) // block), computed // block, pos, flush


@pytest.mark.parametrize("L", [1, 2, 3, 5])
@pytest.mark.parametrize("block", [1, 2, 4, 7])
def test_rows_in_every_phase_keep_state_and_ring_equal_to_the_recurrence(
    replay_state_update, L, block
):
    """Three rows beside a padding row: a prompt in mid-block, one at a block's end, a leftover."""
    exact = replay_state_update is reference.replay_state_update
    dtype = torch.float64 if exact else torch.float32
    close = {"rtol": 1e-9, "atol": 1e-9} if exact else {"rtol": 2e-5, "atol": 2e-5}
    heads, headdim, dstate, groups, steps = 4, 3, 5, 2, 3 * L + block
    gen = torch.Generator().manual_seed(L + block)

    def draw(*shape):
        return torch.randn(shape, generator=gen).to(dtype).to(DEVICE)

    def ints(values):
        return torch.tensor(values, dtype=torch.int32, device=DEVICE)

    prompts, computed = [3, 2 * block, 9], [3, 2 * block, 8]
    columns = 1 + (9 + steps) // block + 2
    slots = 1 + 3 * columns
    full = {"fill_value": NAN, "dtype": dtype, "device": DEVICE}
    pools = {
        "state": torch.full((slots, heads, headdim, dstate), **full),
        "ring_x": torch.full((slots, L, heads, headdim), **full),
        "ring_dt": torch.full((slots, L, heads), **full),
        "ring_B": torch.full((slots, L, groups, dstate), **full),
    }
    A, D, bias, limit = -torch.exp(draw(heads)), draw(heads), draw(heads), (0.05, 2.0)
    want = [draw(heads, headdim, dstate).double() for _ in prompts]
    for row, count in enumerate(computed):
        pools["state"][1 + row * columns + (count - 1) // block] = want[row].to(dtype)
    for _ in range(steps):
        plan = [
            (1 + row * columns + read, 1 + row * columns + write, pos, flush)
            for row, (base, count) in enumerate(zip(prompts, computed, strict=True))
            for read, write, pos, flush in [schedule(base, count, block, L)]
        ]
        plan.insert(1, (0, 0, 0, False))
        x, dt = draw(4, heads, headdim), draw(4, heads)
        B, C = draw(4, groups, dstate), draw(4, groups, dstate)
        x[1] = NAN
        reads, writes, cursors, flushes = zip(*plan, strict=True)
        before = {name: pool.clone() for name, pool in pools.items()}
        y = replay_state_update(
            x,
            dt,
            A,
            B,
            C,
            D=D,
            dt_bias=bias,
            dt_limit=limit,
            **pools,
            state_read_slots=ints(reads),
            write_slots=ints(writes),
            write_pos=ints(cursors),
            is_flush=torch.tensor(flushes, device=DEVICE),
        )
        assert not y[1].any()
        for name, pool in pools.items():
            kept = [slot for slot in range(slots) if slot not in writes or slot == 0]
            assert pool[kept].nan_to_num().equal(before[name][kept].nan_to_num())
        for row, at in enumerate((0, 2, 3)):
            out, want[row] = recurrence_step(
                want[row], x[at], dt[at], A, B[at], C[at], D, bias, limit
            )
            torch.testing.assert_close(y[at].double(), out, **close)
            computed[row] += 1
        live = [plan[at] for at in (0, 2, 3)]
        whole = reference.materialize_state(
            A,
            **pools,
            state_read_slots=ints([write if flush else read for read, write, _, flush in live]),
            ring_slots=ints([write for _, write, _, _ in live]),
            pending=ints([0 if flush else pos + 1 for _, _, pos, flush in live]),
        )
        torch.testing.assert_close(whole.double(), torch.stack(want), **close)


def test_extreme_inputs_give_no_nan_and_no_infinity(replay_state_update):
    worst = run(
        replay_state_update,
        33,
        16,
        heads=2,
        headdim=4,
        dstate=8,
        groups=1,
        dtype=torch.float32,
        state_dtype=torch.float32,
        scale=30.0,
    )
    assert worst < 1e-5
