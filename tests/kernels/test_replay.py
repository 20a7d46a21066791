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
        "torch",
        pytest.param(
            "triton",
            marks=pytest.mark.skipif(not RUNS_TRITON, reason="needs a GPU or TRITON_INTERPRET=1"),
        ),
    ]
)
def replay_state_update(request):
    if request.param == "torch":
        return reference.replay_state_update
    from ssmcore_kernels.triton.replay import replay_state_update

    return replay_state_update


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
):
    """A row that decodes `steps` tokens in slot 2, with a padding row beside it."""
    gen = torch.Generator().manual_seed(0)

    def draw(*shape, dtype=torch.float32):
        return torch.randn(shape, generator=gen).to(dtype).to(DEVICE)

    A = -torch.exp(draw(heads))
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
        x, dt = draw(2, heads, headdim, dtype=dtype), draw(2, heads, dtype=dtype)
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


@pytest.mark.parametrize("L", [1, 2, 3, 16])
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
