"""Builders of small Mamba-2 checkpoints, and a driver that runs plans by hand."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from planning_builders import make_pipeline
from safetensors.torch import load_file

from ssmcore.models.config import Mamba2Config
from ssmcore.models.mamba2 import Mamba2Model
from ssmcore.state import StatePool, slot_tensors
from ssmcore.step import Step


def tiny_config(**changes: Any) -> Mamba2Config:
    sizes: dict[str, Any] = {
        "vocab_size": 96,
        "d_model": 32,
        "num_layers": 2,
        "heads": 8,
        "headdim": 8,
        "dstate": 16,
        "groups": 1,
        "chunk_size": 8,
    }
    return Mamba2Config(**{**sizes, **changes})


def save_with_transformers(directory: Path, *, shard: str | None = None, **changes: Any) -> Any:
    """A random model of transformers, all its tensors random, saved to `directory`."""
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    sizes: dict[str, Any] = {
        "vocab_size": 96,
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_heads": 8,
        "head_dim": 8,
        "state_size": 16,
        "n_groups": 1,
        "chunk_size": 8,
        "eos_token_id": None,
    }
    torch.manual_seed(7)
    model = transformers.Mamba2ForCausalLM(transformers.Mamba2Config(**{**sizes, **changes}))
    with torch.no_grad():
        for name, value in model.named_parameters():
            if name.endswith(("norm.weight", "norm_f.weight", ".D")):
                value.uniform_(0.5, 1.5)
            elif name.endswith("proj.bias") or name.endswith("conv1d.bias"):
                value.uniform_(-0.3, 0.3)
    model.save_pretrained(directory, **({"max_shard_size": shard} if shard else {}))
    return model.eval()


def save_in_original_format(source: Path, directory: Path, **changes: Any) -> None:
    """Rewrite a checkpoint of transformers in the original format, pickled."""
    config = json.loads((source / "config.json").read_text())
    tensors = load_file(source / "model.safetensors")
    tensors["backbone.embedding.weight"] = tensors.pop("backbone.embeddings.weight")
    if config["tie_word_embeddings"]:
        tensors["lm_head.weight"] = tensors["backbone.embedding.weight"]
    directory.mkdir(exist_ok=True)
    torch.save(tensors, directory / "pytorch_model.bin")
    original = {
        "d_model": config["hidden_size"],
        "d_intermediate": 0,
        "n_layer": config["num_hidden_layers"],
        "vocab_size": config["vocab_size"] - 3,
        "ssm_cfg": {
            "layer": "Mamba2",
            "d_state": config["state_size"],
            "headdim": config["head_dim"],
            "ngroups": config["n_groups"],
            "chunk_size": config["chunk_size"],
        },
        "attn_layer_idx": [],
        "attn_cfg": {},
        "rms_norm": True,
        "residual_in_fp32": True,
        "fused_add_norm": True,
        "pad_vocab_size_multiple": 8,
        "tie_embeddings": config["tie_word_embeddings"],
    }
    (directory / "config.json").write_text(json.dumps({**original, **changes}))


class Driver:
    """Runs steps of a model without an engine; request `n` has slot `n` (1 and up).

    Every slot but the null slot starts as NaN: whoever reads a state that was not written shows it.
    """

    def __init__(
        self, model: Mamba2Model, *, decode: str = "baseline", graph: str = "none", slots: int = 8
    ) -> None:
        self.model = model
        self.pipeline = make_pipeline(
            decode=decode, graph=graph, device="cpu", chunk_size=model.config.chunk_size
        )
        self.decode = self.pipeline.selection.decode
        dtype = "float64" if model.dtype == torch.float64 else "float32"
        tensors = slot_tensors(model.mixer_shape(dtype), self.decode)
        self.pool = StatePool(tensors, model.config.num_layers, slots, "cpu")
        self.pool.poison(range(1, slots))
        self.computed = dict.fromkeys(range(1, slots), 0)
        self.bases = dict.fromkeys(range(1, slots), 0)

    def step(
        self, rows: dict[int, list[int]], *, prefilling: tuple[int, ...] = (), padding: int = 0
    ) -> torch.Tensor:
        """Run the tokens of each request; returns logits of all tokens, (tokens, vocab)."""
        lens = [len(tokens) for tokens in rows.values()] + [0] * padding
        seq_lens = [self.computed[slot] + len(tokens) for slot, tokens in rows.items()]
        self.bases.update({slot: self.computed[slot] + len(rows[slot]) for slot in prefilling})
        bases = [self.bases[slot] for slot in rows] + [0] * padding
        step = Step.of(
            np.concatenate([[0], np.cumsum(lens)]),
            seq_lens + [0] * padding,
            [slot in prefilling for slot in rows] + [False] * padding,
            [[slot] for slot in rows] + [[0]] * padding,
            decode_base=bases if self.decode.needs_decode_base else None,
        )
        plan = self.pipeline.plan(step)
        tokens = [token for row in rows.values() for token in row] + [0] * padding
        hidden = self.model.forward(torch.tensor(tokens), plan, self.pool, self.decode)
        for slot, row in rows.items():
            self.computed[slot] += len(row)
        return self.model.logits(hidden)

    def prefill(self, slot: int, tokens: list[int], *ends: int) -> torch.Tensor:
        """Prefill one request in pieces that end at `ends`; logits of all its tokens."""
        bounds = [0, *ends, len(tokens)]
        pieces = [
            self.step({slot: tokens[start:end]}, prefilling=(slot,))
            for start, end in pairwise(bounds)
        ]
        return torch.cat(pieces)

    def greedy(self, slot: int, token: int, count: int) -> tuple[list[int], torch.Tensor]:
        """Decode `count` tokens from `token` on; the tokens and the logits they came from."""
        chosen, logits = [], []
        for _ in range(count):
            logits.append(self.step({slot: [token]})[0])
            token = int(logits[-1].argmax())
            chosen.append(token)
        return chosen, torch.stack(logits)
