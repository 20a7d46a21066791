"""Norms against the formula in float64."""

from __future__ import annotations

import pytest
import torch
from kernel_builders import draw, generator
from ssmcore_kernels.reference.norm import add_rms_norm, gated_rms_norm, rms_norm


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_rms_norm_equals_the_formula(dtype):
    gen = generator()
    x, weight = draw(gen, 5, 12, dtype=dtype), draw(gen, 12, dtype=dtype)
    out = rms_norm(x, weight, 1e-5)
    assert out.dtype == dtype
    wide = x.double()
    want = wide / wide.pow(2).mean(-1, keepdim=True).add(1e-5).sqrt() * weight.double()
    bound = 4 * torch.finfo(dtype).eps
    assert (out.double() - want).norm() <= bound * want.norm()


def test_a_row_of_zeros_gives_zeros():
    x = torch.zeros(2, 8)
    assert not rms_norm(x, torch.ones(8), 1e-5).any()
    assert not gated_rms_norm(x, x, torch.ones(8), group_size=4, eps=1e-5).any()


@pytest.mark.parametrize("group_size", [12, 4, 3, 1])
def test_gated_norm_is_per_group(group_size):
    gen = generator()
    x, z, weight = draw(gen, 5, 20)[:, 8:], draw(gen, 5, 12), draw(gen, 12)
    out = gated_rms_norm(x, z, weight, group_size=group_size, eps=1e-5)
    for start in range(0, 12, group_size):
        part = slice(start, start + group_size)
        gated = x[:, part] * z[:, part] / (1 + torch.exp(-z[:, part]))
        rms = gated.pow(2).mean(-1, keepdim=True).add(1e-5).sqrt()
        torch.testing.assert_close(out[:, part], gated / rms * weight[part])


@pytest.mark.parametrize("residual_dtype", [torch.float32, torch.bfloat16])
def test_add_rms_norm_keeps_the_residual_in_its_own_dtype(residual_dtype):
    gen = generator()
    x, residual = draw(gen, 3, 8).bfloat16(), draw(gen, 3, 8, dtype=residual_dtype)
    weight = torch.ones(8, dtype=torch.bfloat16)
    kept = residual.clone()
    out, total = add_rms_norm(x, residual, weight, 1e-5)
    assert (out.dtype, total.dtype) == (torch.bfloat16, residual_dtype)
    assert torch.equal(total, kept + x)
    assert torch.equal(residual, kept)
    assert torch.equal(out, rms_norm(total, weight, 1e-5))


def test_a_group_size_that_does_not_divide_is_refused():
    x = torch.zeros(2, 8)
    with pytest.raises(ValueError, match="group_size: 3; wanted a divisor of the 8 channels"):
        gated_rms_norm(x, x, torch.ones(8), group_size=3, eps=1e-5)
