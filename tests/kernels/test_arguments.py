"""A wrong argument is named, with what came and what must come, before any state is touched."""

from __future__ import annotations

import re

import pytest
import torch
from kernel_builders import MixerInputs, bools, generator, ints, poisoned
from ssmcore_kernels import Kernels, for_device
from ssmcore_kernels.reference.replay import replay_state_update

SHAPE = (4, 8, 16, 2)
SLOTS = {"read_slots": ints([1, 2]), "write_slots": ints([1, 2])}


def step_arguments():
    inputs = MixerInputs(generator(), 2, SHAPE, torch.float32)
    named = {"x": inputs.x, "dt": inputs.dt, "A": inputs.A, "B": inputs.B, "C": inputs.C}
    state = poisoned(3, *SHAPE[:3], dtype=torch.float32, but=[1, 2])
    return {**named, **inputs.rest, "state": state, **SLOTS}


def replay_arguments():
    arguments = step_arguments()
    rings = {
        "ring_x": torch.zeros(3, 5, 4, 8),
        "ring_dt": torch.zeros(3, 5, 4),
        "ring_B": torch.zeros(3, 5, 2, 16),
    }
    cursors = {"write_pos": ints([0, 0]), "is_flush": bools([True, True])}
    arguments["state_read_slots"] = arguments.pop("read_slots")
    return {**arguments, **rings, **cursors}


def prefill_arguments():
    return {
        **step_arguments(),
        "cu_chunk_seqlens": ints([0, 1, 2]),
        "seq_idx": ints([0, 1]),
        "has_initial_states": bools([True, True]),
        "write_chunks": ints([0, 1]),
    }


def conv_arguments():
    state = poisoned(3, 3, 6, dtype=torch.float32, but=[1, 2])
    rest = {"weight": torch.ones(6, 4), "bias": torch.ones(6)}
    return {"x": torch.ones(2, 6), **rest, "conv_state": state, **SLOTS}


def conv_prefill_arguments():
    return {
        **conv_arguments(),
        "query_start_loc": ints([0, 1, 2]),
        "has_initial_states": bools([True, True]),
        "write_rows": ints([0, 1]),
        "write_ends": ints([1, 2]),
    }


KERNELS = for_device("cpu")
CASES = [
    (KERNELS.selective_state_update, step_arguments),
    (KERNELS.ssd_prefill, prefill_arguments),
    (KERNELS.causal_conv1d_update, conv_arguments),
    (KERNELS.causal_conv1d_prefill, conv_prefill_arguments),
    (replay_state_update, replay_arguments),
]
EVERY = [
    pytest.param(kernel, arguments, name, id=f"{kernel.__name__}-{name}")
    for kernel, arguments in CASES
    for name, value in arguments().items()
    if isinstance(value, torch.Tensor)
]


@pytest.mark.parametrize(("kernel", "arguments"), CASES)
def test_right_arguments_are_taken(kernel, arguments):
    assert kernel(**arguments()).isfinite().all()


@pytest.mark.parametrize(("kernel", "arguments", "name"), EVERY)
@pytest.mark.parametrize("fault", ["dimension", "size", "dtype", "device"])
def test_a_wrong_argument_is_named_and_nothing_touched(kernel, arguments, name, fault):
    values = arguments()
    right = values[name]
    if fault == "dimension":
        wrong = right[None]
    elif fault == "size":
        wrong = torch.cat([right, right[..., :1]], dim=-1)
    elif fault == "dtype":
        wrong = right.to(torch.uint8)
    else:
        wrong = right.to("meta")
    values[name] = wrong
    pools = {pool: values[pool].clone() for pool in values if "state" in pool and pool != name}
    decides = fault in ("dimension", "size") or name in ("x", "B")  # what others are held to
    named = r"\w+" if decides else name
    with pytest.raises(ValueError, match=rf"^{named}: .*wanted"):
        kernel(**values)
    for pool, before in pools.items():
        if before.is_floating_point():
            assert torch.equal(values[pool].nan_to_num(), before.nan_to_num())


def test_the_message_says_what_came_and_what_must_come():
    values = step_arguments()
    values["state"] = torch.zeros(3, 4, 8, 9)
    message = (
        "state: (3, 4, 8, 9), float32, on cpu; wanted (slots, heads, headdim, dstate) ="
        " (3, 4, 8, 16), float32 or bfloat16 or float16 or float64, on cpu"
    )
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        KERNELS.selective_state_update(**values)


def test_groups_must_divide_the_heads():
    values = step_arguments()
    for name in ("B", "C"):
        values[name] = torch.zeros(2, 3, 16)
    with pytest.raises(ValueError, match="B: 3 groups; wanted a divisor of the 4 heads of x"):
        KERNELS.selective_state_update(**values)


def test_for_device_takes_names_and_devices():
    assert isinstance(KERNELS, Kernels)
    assert for_device(torch.device("cpu")) is KERNELS
    assert for_device("cuda:1") is for_device("cuda")
