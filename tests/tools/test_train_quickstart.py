"""What the training script holds out and how it scores; what it writes can be served."""

from __future__ import annotations

import importlib
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from ssmcore.models.hub import resolve

TOOLS = Path(__file__).parents[2] / "tools"


@pytest.fixture
def training(monkeypatch):
    monkeypatch.syspath_prepend(TOOLS)
    return importlib.import_module("train_quickstart")


def library(folder, names, mark):
    for name in names:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("".join(f"{mark}_{name.count('a')}_{k} = {k}\n" for k in range(40)))
    return folder


def test_the_newest_version_of_a_path_is_taken(training, tmp_path):
    new = library(tmp_path / "new", ["b.py"], "new")
    old = library(tmp_path / "old", ["a.py", "b.py", "site-packages/c.py"], "old")
    texts = training.documents([new, old])
    assert list(texts) == ["a.py", "b.py"]
    assert texts["b.py"].startswith(b"new")


def test_a_tar_holds_what_its_folder_holds(training, tmp_path):
    folder = library(tmp_path / "lib", ["a.py", "p/b.py"], "x")
    with tarfile.open(tmp_path / "lib.tar", "w") as archive:
        archive.add(folder, arcname="")
    assert training.documents([tmp_path / "lib.tar"]) == training.documents([folder])


def test_text_that_training_has_too_counts_as_shared(training):
    known = b"a = 1\nb = 2\n\nc = 3\nd = 4\n"
    assert training.shared([b"a = 1\nb = 2\nc = 3\n"], [known]) == [1.0]
    assert training.shared([b"a = 1\nb = 2\ne = 5\n"], [known]) == [0.0]
    assert training.shared([b"a = 1\nb = 2\nc = 3\nx = 1\ny = 2\nz = 3\n"], [known]) == [0.5]


def test_a_model_that_knows_nothing_needs_all_the_bits(training):
    def ignorant(tokens):
        return torch.zeros(*tokens.shape, 256)

    bits, counted = training.bits_per_byte(ignorant, [b"x" * 100, b"y" * 70], "cpu", window=64)
    assert bits == pytest.approx(8.0)
    assert counted == 170


def test_the_bundled_weights_give_the_logits_of_transformers(training):
    transformers = pytest.importorskip("transformers")
    folder = resolve("quickstart")
    theirs = transformers.Mamba2ForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    ours = importlib.import_module("training_model")
    model = ours.TrainingModel(ours.CONFIG)
    weights = load_file(folder / "model.safetensors")
    model.load_state_dict({name: value.float() for name, value in weights.items()})
    text = b"import os\n\n\nclass Stack:\n    def __init__(self):\n        self.items"
    tokens = torch.tensor([[256, *text[:63]]])
    with torch.no_grad():
        torch.testing.assert_close(model(tokens), theirs(tokens).logits, rtol=0, atol=1e-4)


def test_a_tiny_run_writes_a_whole_model(tmp_path):
    data = library(tmp_path / "lib", [f"m{k}a.py" for k in range(80)], "value")
    command = [sys.executable, TOOLS / "train_quickstart.py", "--tiny", "--steps", "3"]
    subprocess.run([*command, "--data", data, "--out", tmp_path / "out"], check=True)
    wanted = ["config.json", "model.safetensors", "training.json"]
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == wanted
