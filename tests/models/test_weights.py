"""Checkpoints that are not what they should be, and how much memory loading takes."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import torch
from model_builders import save_in_original_format, save_with_transformers
from safetensors.torch import load_file, save_file

from ssmcore.errors import CheckpointError
from ssmcore.models.loading import load_model


def change(directory, edit):
    """Rewrite a checkpoint after `edit(tensors)`."""
    path = directory / "model.safetensors"
    tensors = load_file(path)
    edit(tensors)
    save_file(tensors, path)


def refused(directory, *parts):
    with pytest.raises(CheckpointError) as caught:
        load_model(directory)
    for part in parts:
        assert part in str(caught.value)


def test_a_missing_tensor_is_named(tmp_path):
    save_with_transformers(tmp_path)
    change(tmp_path, lambda tensors: tensors.pop("backbone.layers.1.mixer.A_log"))
    refused(tmp_path, "backbone.layers.1.mixer.A_log missing")


def test_a_missing_head_of_an_untied_model_is_named(tmp_path):
    save_with_transformers(tmp_path)
    change(tmp_path, lambda tensors: tensors.pop("lm_head.weight"))
    refused(tmp_path, "lm_head.weight missing")


def test_an_unknown_tensor_is_named(tmp_path):
    save_with_transformers(tmp_path)
    change(tmp_path, lambda t: t.update({"backbone.layers.1.mlp.fc1.weight": torch.ones(2)}))
    refused(tmp_path, "model.safetensors", "backbone.layers.1.mlp.fc1.weight")


def test_tensors_of_more_layers_than_configured_are_refused(tmp_path):
    save_with_transformers(tmp_path, num_hidden_layers=3)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 2}))
    refused(tmp_path, "backbone.layers.2.", "2 layers", "and 5 more")


def test_a_wrong_shape_is_named_with_the_shape_wanted(tmp_path):
    save_with_transformers(tmp_path)
    name = "backbone.layers.0.mixer.conv1d.weight"
    change(tmp_path, lambda t: t.update({name: t[name][:, 0].contiguous()}))
    refused(tmp_path, name, "(96, 4)", "(96, 1, 4)")


def test_a_quantised_tensor_is_refused(tmp_path):
    save_with_transformers(tmp_path)
    name = "backbone.layers.0.mixer.in_proj.weight"
    change(tmp_path, lambda t: t.update({name: t[name].to(torch.int8)}))
    refused(tmp_path, name, "int8")


def test_a_tied_head_that_differs_is_refused(tmp_path):
    save_with_transformers(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": True}))
    refused(tmp_path, "lm_head.weight", "tie_word_embeddings")


@pytest.mark.parametrize("keep", [0, 7, 500, -1])
def test_a_truncated_file_is_named(keep, tmp_path):
    save_with_transformers(tmp_path)
    path = tmp_path / "model.safetensors"
    path.write_bytes(path.read_bytes()[:keep])
    refused(tmp_path, "model.safetensors", "damaged or cut short")


@pytest.mark.parametrize("keep", [0, 500, -100])
def test_a_truncated_pickled_file_is_named(keep, tmp_path):
    save_with_transformers(tmp_path / "hf")
    save_in_original_format(tmp_path / "hf", tmp_path)
    path = tmp_path / "pytorch_model.bin"
    path.write_bytes(path.read_bytes()[:keep])
    refused(tmp_path, "pytorch_model.bin", "damaged")


class Harmful:
    def __reduce__(self):
        return (print, ("this was run",))


def test_a_pickled_file_never_runs_code(tmp_path, capsys):
    save_with_transformers(tmp_path / "hf")
    save_in_original_format(tmp_path / "hf", tmp_path)
    torch.save({"backbone.embedding.weight": Harmful()}, tmp_path / "pytorch_model.bin")
    refused(tmp_path, "pytorch_model.bin", "more than tensors")
    assert "this was run" not in capsys.readouterr().out


def test_a_directory_without_weights_is_refused(tmp_path):
    save_with_transformers(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    refused(tmp_path, "no weights", "model.safetensors.index.json", "pytorch_model.bin")


def sharded(directory):
    save_with_transformers(directory, shard="20KB")
    return directory / "model.safetensors.index.json"


@pytest.mark.parametrize("file", ["../model.safetensors", "/etc/passwd", "..", "", 3, "gone"])
def test_a_shard_outside_the_directory_or_missing_is_refused(file, tmp_path):
    index = sharded(tmp_path)
    values = json.loads(index.read_text())
    values["weight_map"]["lm_head.weight"] = file
    index.write_text(json.dumps(values))
    refused(tmp_path, "index.json", "lm_head.weight", repr(file))


def test_an_index_that_does_not_match_its_shards_is_refused(tmp_path):
    index = sharded(tmp_path)
    values = json.loads(index.read_text())
    files = sorted(set(values["weight_map"].values()))
    right = values["weight_map"]["lm_head.weight"]
    values["weight_map"]["lm_head.weight"] = next(file for file in files if file != right)
    index.write_text(json.dumps(values))
    refused(tmp_path, "lm_head.weight is not in")
    values["weight_map"]["lm_head.weight"] = right
    del values["weight_map"]["backbone.norm_f.weight"]
    index.write_text(json.dumps(values))
    refused(tmp_path, "backbone.norm_f.weight not in the index")


MEASURE = """
import re, sys, threading, time
import torch
from ssmcore.models.loading import load_model, random_model
from ssmcore.models.config import Mamba2Config

def anonymous():
    text = open("/proc/self/status").read()
    return 1024 * int(re.search(r"RssAnon:\\s+(\\d+)", text)[1])

directory, dtype, small = sys.argv[1:]
load_model(small)
peak, done = 0, False
def watch():
    global peak
    while not done:
        peak = max(peak, anonymous())
        time.sleep(0.001)
before = anonymous()
watcher = threading.Thread(target=watch)
watcher.start()
model = load_model(directory, dtype=dtype).model
done = True
watcher.join()
print((max(peak, anonymous()) - before) / model.nbytes)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("kind", ["safetensors", "pickled"])
def test_loading_takes_little_more_than_the_weights(kind, dtype, tmp_path):
    sizes = {"hidden_size": 512, "num_heads": 16, "head_dim": 64, "num_hidden_layers": 12}
    save_with_transformers(tmp_path / "small")
    save_with_transformers(tmp_path / "large", vocab_size=38400, **sizes)
    if kind == "pickled":
        save_in_original_format(tmp_path / "large", tmp_path / "pickled", vocab_size=38400)
    directory = tmp_path / ("pickled" if kind == "pickled" else "large")
    assert sum(file.stat().st_size for file in directory.iterdir()) > 200e6
    command = [sys.executable, "-c", MEASURE, directory, dtype, tmp_path / "small"]
    ratio = float(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    for file in tmp_path.rglob("*.*"):
        file.unlink() if file.is_file() else None
    assert 0.9 < ratio < 1.3
