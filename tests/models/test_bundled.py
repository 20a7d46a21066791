"""The bundled model comes with all it needs."""

from __future__ import annotations

from model_builders import Driver

from ssmcore.models.loading import load_model


def test_the_bundled_model_continues_code():
    model, tokenizer = load_model("quickstart")
    assert tokenizer.eos_token_ids == (256,)
    assert tokenizer.vocab_size <= model.config.vocab_size
    driver = Driver(model)
    first = int(driver.prefill(1, tokenizer.encode("import os\nimport sy"))[-1].argmax())
    assert tokenizer.decode([first]) == "s"
