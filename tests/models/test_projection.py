"""Packed weights give the products of plain ones."""

from __future__ import annotations

import pytest
import torch
from model_builders import Driver, tiny_config

from ssmcore.models import projection
from ssmcore.models.loading import random_model
from ssmcore.models.projection import packed, project


def weights():
    generator = torch.Generator().manual_seed(0)
    return torch.randn(1027, 515, generator=generator)


@pytest.mark.parametrize("rows", [0, 1, 2, 7, 16, 100])
@pytest.mark.parametrize("biased", [False, True])
def test_packed_products_equal_plain_ones(rows, biased):
    weight = weights()
    x = torch.randn(rows, 600)[:, 7:522]
    bias = torch.randn(1027) if biased else None
    expected = project(x.double(), weight.double(), None if bias is None else bias.double())
    got = project(x, packed(weight), bias)
    assert (got.dtype, got.is_mkldnn) == (torch.float32, False)
    torch.testing.assert_close(got, expected.float(), atol=1e-4, rtol=1e-5)


def test_packing_keeps_every_value():
    weight = packed(weights())
    if not weight.is_mkldnn:
        pytest.skip("this build of torch packs no weights")
    assert torch.equal(weight.to_dense(), weights())


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_only_float32_is_packed(dtype):
    weight = weights().to(dtype)
    assert packed(weight) is weight


def test_small_weights_are_left_alone():
    weight = torch.randn(64, 64)
    assert packed(weight) is weight


def test_where_packing_does_not_work_weights_stay_plain(monkeypatch):
    monkeypatch.setattr(projection, "_works", lambda: False)
    weight = weights()
    assert packed(weight) is weight


@pytest.mark.parametrize("tied", [False, True])
def test_a_packed_model_gives_the_logits_of_a_plain_one(tied, monkeypatch):
    config = tiny_config(tied_head=tied, proj_bias=True)
    plain = random_model(config)
    monkeypatch.setattr(projection, "_SMALLEST", 0)
    model = random_model(config)
    assert not plain.weights.layers[0].in_proj.is_mkldnn
    assert not model.weights.embedding.is_mkldnn
    tokens = list(range(11))
    expected, got = (Driver(m).prefill(1, tokens, 1, 4) for m in (plain, model))
    torch.testing.assert_close(got, expected, atol=1e-5, rtol=0)
