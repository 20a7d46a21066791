"""The forward pass against transformers, and against a float64 recurrence token by token."""

from __future__ import annotations

import math

import pytest
import torch
from model_builders import Driver, save_in_original_format, save_with_transformers, tiny_config
from ssmcore_kernels.reference.recurrence import conv_recurrence, ssd_recurrence

from ssmcore.errors import StepError
from ssmcore.models.loading import load_model, random_model

PROMPT = torch.randint(96, (37,), generator=torch.Generator().manual_seed(3)).tolist()

VARIANTS = {
    "untied": {},
    "tied": {"tie_word_embeddings": True},
    "biases": {"use_bias": True},
    "no-conv-bias": {"use_conv_bias": False},
    "narrow-residual": {"residual_in_fp32": False},
    "groups": {"n_groups": 2},
    "time-step-limit": {"time_step_limit": (0.01, 0.05)},
    "short-conv": {"conv_kernel": 3},
    "odd-heads": {"hidden_size": 36, "num_heads": 6, "head_dim": 12, "n_groups": 3},
}


@torch.no_grad()
def whole_forward(reference, tokens):
    return reference(torch.tensor([tokens]), use_cache=False).logits[0]


@pytest.mark.parametrize("variant", VARIANTS)
def test_prefill_and_decode_give_the_logits_of_transformers(variant, tmp_path):
    reference = save_with_transformers(tmp_path, **VARIANTS[variant])
    driver = Driver(load_model(tmp_path).model)
    prefilled = driver.prefill(1, PROMPT)
    tokens, decoded = driver.greedy(1, int(prefilled[-1].argmax()), 12)
    whole = [*PROMPT, int(prefilled[-1].argmax()), *tokens]
    expected = whole_forward(reference, whole[:-1])
    torch.testing.assert_close(torch.cat([prefilled, decoded]), expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize("ends", [(1,), (1, 2, 3), (8, 16), (5, 19, 20, 36), (35, 36)])
def test_chunked_prefill_gives_the_logits_of_transformers(ends, tmp_path):
    reference = save_with_transformers(tmp_path)
    logits = Driver(load_model(tmp_path).model).prefill(1, PROMPT, *ends)
    expected = whole_forward(reference, PROMPT)
    torch.testing.assert_close(logits, expected, atol=1e-4, rtol=0)


def test_two_hundred_decode_steps_give_the_tokens_of_transformers(tmp_path):
    reference = save_with_transformers(tmp_path, n_groups=2)
    driver = Driver(load_model(tmp_path).model)
    first = int(driver.prefill(1, PROMPT, 20)[-1].argmax())
    tokens, logits = driver.greedy(1, first, 200)
    generated = reference.generate(
        torch.tensor([PROMPT]), max_new_tokens=201, do_sample=False, pad_token_id=0
    )
    assert [first, *tokens] == generated[0, len(PROMPT) :].tolist()
    expected = whole_forward(reference, [*PROMPT, first, *tokens[:-1]])[len(PROMPT) :]
    torch.testing.assert_close(logits, expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize("decode", ["baseline", "replay-torch"])
def test_a_mixed_step_equals_its_rows_alone(decode):
    model = random_model(tiny_config(groups=2))
    alone, mixed = Driver(model), Driver(model, decode=decode)
    for driver in (alone, mixed):
        driver.prefill(1, PROMPT[:9])
        driver.prefill(2, PROMPT[:4])
        driver.prefill(3, PROMPT[:11])
    expected = torch.cat(
        [
            alone.step({1: [5]}),
            alone.step({2: [6]}),
            alone.step({3: PROMPT[11:30]}, prefilling=(3,)),
            alone.step({4: PROMPT[:1]}, prefilling=(4,)),
        ]
    )
    rows = {1: [5], 2: [6], 3: PROMPT[11:30], 4: PROMPT[:1]}
    torch.testing.assert_close(mixed.step(rows, prefilling=(3, 4)), expected, atol=1e-5, rtol=0)


def test_padding_rows_change_no_live_row_and_no_slot():
    model = random_model(tiny_config())
    plain, padded = Driver(model), Driver(model, graph="full-decode")
    for driver in (plain, padded):
        driver.prefill(1, PROMPT)
    expected = plain.step({1: [5]})
    logits = padded.step({1: [5]}, padding=3)
    torch.testing.assert_close(logits[:1], expected, atol=1e-6, rtol=0)
    assert torch.isfinite(logits).all()
    for layer in range(model.config.num_layers):
        for tensor in padded.pool.layer(layer).values():
            assert not tensor[0].any()
            assert tensor[2:].isnan().all()


def test_groups_equal_a_float64_recurrence_token_by_token():
    config = tiny_config(groups=4, proj_bias=True, time_step_limit=(0.002, 0.09))
    model = random_model(config, dtype="float64", seed=5)
    driver = Driver(model)
    logits = torch.cat([driver.prefill(1, PROMPT[:30], 3, 17), driver.step({1: PROMPT[30:31]})])
    torch.testing.assert_close(logits, recurrent_logits(model, PROMPT[:31]).float())
    hidden = model.weights.embedding[PROMPT[:1]]
    assert hidden.dtype == torch.float64


def recurrent_logits(model, tokens):
    """The model written down once more: one row, every head and group in a plain loop."""
    config, weights = model.config, model.weights
    inner, shared = config.d_inner, config.groups * config.dstate
    stream = weights.embedding[tokens]
    for layer in weights.layers:
        normed = root_mean_square(stream, config.norm_eps) * layer.norm
        z, xbc, dt = (normed @ layer.in_proj.t() + layer.in_proj_bias).split(
            [inner, inner + 2 * shared, config.heads], dim=-1
        )
        xbc, _ = conv_recurrence(xbc, layer.conv_weight, layer.conv_bias)
        x, b, c = xbc.split([inner, shared, shared], dim=-1)
        y, _ = ssd_recurrence(
            x.reshape(-1, config.heads, config.headdim),
            dt,
            layer.A,
            b.reshape(-1, config.groups, config.dstate),
            c.reshape(-1, config.groups, config.dstate),
            D=layer.D,
            dt_bias=layer.dt_bias,
            dt_limit=config.time_step_limit,
        )
        gated = y.flatten(1) * torch.nn.functional.silu(z)
        pieces = gated.split(inner // config.groups, dim=-1)
        gated = torch.cat([root_mean_square(p, config.norm_eps) for p in pieces], dim=-1)
        stream = stream + (gated * layer.gate_norm) @ layer.out_proj.t() + layer.out_proj_bias
    return root_mean_square(stream, config.norm_eps) * weights.final_norm @ weights.head.t()


def root_mean_square(x, eps):
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt()


@pytest.mark.parametrize("tied", [False, True])
def test_the_original_format_gives_the_same_logits(tied, tmp_path):
    save_with_transformers(tmp_path / "hf", tie_word_embeddings=tied)
    save_in_original_format(tmp_path / "hf", tmp_path / "original")
    ours, theirs = (
        load_model(tmp_path / "hf").model,
        load_model(tmp_path / "original").model,
    )
    assert (theirs.weights.head is theirs.weights.embedding) == tied
    assert torch.equal(Driver(ours).prefill(1, PROMPT), Driver(theirs).prefill(1, PROMPT))


def test_sharded_weights_give_the_same_logits(tmp_path):
    save_with_transformers(tmp_path / "one")
    save_with_transformers(tmp_path / "many", shard="20KB")
    assert len(list((tmp_path / "many").glob("*.safetensors"))) > 2
    one, many = (load_model(tmp_path / name).model for name in ("one", "many"))
    assert torch.equal(Driver(one).prefill(1, PROMPT), Driver(many).prefill(1, PROMPT))


def test_bfloat16_stays_near_float32_and_keeps_the_recurrence_wide(tmp_path):
    save_with_transformers(tmp_path)
    wide, narrow = load_model(tmp_path).model, load_model(tmp_path, dtype="bfloat16").model
    assert {narrow.weights.layers[0].A.dtype, narrow.weights.layers[0].D.dtype} == {torch.float32}
    assert narrow.mixer_shape("float32").conv_dtype == "bfloat16"
    expected = Driver(wide).prefill(1, PROMPT)
    got = Driver(narrow).prefill(1, PROMPT)
    assert got.dtype == torch.float32
    assert (got - expected).norm() / expected.norm() < 0.05


def test_the_wrong_number_of_tokens_is_refused_before_any_slot_changes():
    model = random_model(tiny_config())
    driver = Driver(model)
    plan = driver.pipeline.plan(_one_prefill(5))
    with pytest.raises(StepError, match=r"\(4,\).*\(5,\)"):
        model.forward(torch.zeros(4, dtype=torch.int64), plan, driver.pool, driver.decode)
    assert all(t[1:].isnan().all() for t in driver.pool.layer(0).values())


def _one_prefill(tokens):
    from planning_builders import make_step

    return make_step([(tokens, tokens)], prefilling=[True])


def test_same_seed_same_random_model():
    first, second, other = (random_model(tiny_config(), seed=seed) for seed in (1, 1, 2))
    assert torch.equal(first.weights.layers[1].in_proj, second.weights.layers[1].in_proj)
    assert not torch.equal(first.weights.layers[1].in_proj, other.weights.layers[1].in_proj)
    assert math.isfinite(first.nbytes)
