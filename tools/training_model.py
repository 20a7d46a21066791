"""Mamba-2 for training: batched, whole sequences, autograd; weights as in the Hugging Face format.

Serving has its own forward pass (`ssmcore.models`); this one exists so that a small model can be
trained in minutes. The scan is the chunked form of arXiv 2405.21060, in matrix products.
"""

from __future__ import annotations

import math

import torch
from torch import nn
from torch.nn import functional

CONFIG = {
    "architectures": ["Mamba2ForCausalLM"],
    "model_type": "mamba2",
    "hidden_size": 256,
    "num_hidden_layers": 8,
    "num_heads": 8,
    "head_dim": 64,
    "expand": 2,
    "state_size": 64,
    "n_groups": 1,
    "conv_kernel": 4,
    "chunk_size": 64,
    "vocab_size": 257,
    "use_bias": False,
    "use_conv_bias": True,
    "hidden_act": "silu",
    "layer_norm_epsilon": 1e-5,
    "rms_norm": True,
    "residual_in_fp32": True,
    "norm_before_gate": False,
    "tie_word_embeddings": True,
    "time_step_limit": [0.0, {"__float__": "Infinity"}],
    "bos_token_id": 256,
    "eos_token_id": 256,
    "pad_token_id": 256,
    "torch_dtype": "bfloat16",
}


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float = 1e-5) -> torch.Tensor:
    wide = x.float()
    return wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * weight


class Norm(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))


def scan(x, dt, rates, b, c, chunk):
    """x (batch, length, heads, headdim), dt (.., heads), b, c (.., dstate); y like x."""
    batch, length, heads, headdim = x.shape
    parts = length // chunk
    x = x.view(batch, parts, chunk, heads, headdim)
    b, c = b.view(batch, parts, chunk, -1), c.view(batch, parts, chunk, -1)
    dt = dt.view(batch, parts, chunk, heads).permute(0, 1, 3, 2)
    cum = torch.cumsum(dt * rates[:, None], dim=-1)  # (batch, parts, heads, chunk)
    causal = torch.ones(chunk, chunk, dtype=torch.bool, device=x.device).tril()
    span = (cum[..., :, None] - cum[..., None, :]).masked_fill(~causal, -math.inf)
    weight = torch.exp(span) * dt[..., None, :]
    weight = (weight * (c @ b.transpose(-1, -2)).float()[:, :, None]).to(x.dtype)
    xs = x.permute(0, 1, 3, 2, 4)
    y = weight @ xs
    left = (torch.exp(cum[..., -1:] - cum) * dt).to(x.dtype)
    added = (xs * left[..., None]).transpose(-1, -2) @ b[:, :, None]  # (.., heads, headdim, dstate)
    ends = functional.pad(cum[..., -1].permute(0, 2, 1), (1, 0)).cumsum(-1)  # per part
    between = (ends[..., :-1, None] - ends[..., None, 1:]).masked_fill(
        ~torch.ones(parts, parts, dtype=torch.bool, device=x.device).tril(-1), -math.inf
    )
    flat = added.float().permute(0, 2, 1, 3, 4).flatten(3)
    before = (torch.exp(between) @ flat).view(batch, heads, parts, headdim, -1)
    before = before.permute(0, 2, 1, 4, 3).to(x.dtype)
    y = y + (c[:, :, None] @ before) * torch.exp(cum)[..., None].to(x.dtype)
    return y.permute(0, 1, 3, 2, 4).reshape(batch, length, heads, headdim)


class Mixer(nn.Module):
    def __init__(self, config: dict) -> None:
        super().__init__()
        self.heads, self.headdim = config["num_heads"], config["head_dim"]
        self.dstate, self.chunk = config["state_size"], config["chunk_size"]
        hidden, inner = config["hidden_size"], self.heads * self.headdim
        channels = inner + 2 * self.dstate
        self.in_proj = nn.Linear(hidden, inner + channels + self.heads, bias=False)
        self.conv1d = nn.Conv1d(channels, channels, config["conv_kernel"], groups=channels)
        dt = torch.exp(torch.empty(self.heads).uniform_(math.log(1e-3), math.log(1e-1)))
        self.dt_bias = nn.Parameter(dt + torch.log(-torch.expm1(-dt)))
        self.A_log = nn.Parameter(torch.empty(self.heads).uniform_(1, 16).log())
        self.D = nn.Parameter(torch.ones(self.heads))
        self.norm = Norm(inner)
        self.out_proj = nn.Linear(inner, hidden, bias=False)

    def forward(self, u: torch.Tensor) -> torch.Tensor:
        batch, length, _ = u.shape
        inner = self.heads * self.headdim
        z, xbc, dt = self.in_proj(u).split([inner, inner + 2 * self.dstate, self.heads], dim=-1)
        padded = functional.pad(xbc, (0, 0, self.conv1d.kernel_size[0] - 1, 0))
        taps = self.conv1d.weight[:, 0].t()
        xbc = self.conv1d.bias + sum(padded[:, k : k + length] * taps[k] for k in range(len(taps)))
        x, b, c = functional.silu(xbc).to(u.dtype).split([inner, self.dstate, self.dstate], dim=-1)
        x = x.view(batch, length, self.heads, self.headdim)
        dt = functional.softplus(dt.float() + self.dt_bias)
        y = scan(x, dt, -torch.exp(self.A_log), b, c, self.chunk)
        y = (y + self.D.to(x.dtype)[:, None] * x).flatten(2)
        gated = y.float() * functional.silu(z.float())
        return self.out_proj(rms_norm(gated, self.norm.weight).to(u.dtype))


class Block(nn.Module):
    def __init__(self, config: dict) -> None:
        super().__init__()
        self.norm = Norm(config["hidden_size"])
        self.mixer = Mixer(config)


class Backbone(nn.Module):
    def __init__(self, config: dict) -> None:
        super().__init__()
        self.embeddings = nn.Embedding(config["vocab_size"], config["hidden_size"])
        self.layers = nn.ModuleList(Block(config) for _ in range(config["num_hidden_layers"]))
        self.norm_f = Norm(config["hidden_size"])


class TrainingModel(nn.Module):
    """Returns logits (batch, length, vocab) in float32 for tokens (batch, length)."""

    def __init__(self, config: dict) -> None:
        super().__init__()
        self.backbone = Backbone(config)
        nn.init.normal_(self.backbone.embeddings.weight, std=0.02)
        scale = 1 / math.sqrt(2 * config["num_hidden_layers"])
        for block in self.backbone.layers:
            nn.init.normal_(block.mixer.in_proj.weight, std=0.02)
            nn.init.normal_(block.mixer.out_proj.weight, std=0.02 * scale)

    def forward(self, tokens: torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        with torch.autocast(tokens.device.type, dtype, enabled=dtype != torch.float32):
            residual = self.backbone.embeddings(tokens).float()
            for block in self.backbone.layers:
                residual = residual + block.mixer(rms_norm(residual, block.norm.weight).to(dtype))
            hidden = rms_norm(residual, self.backbone.norm_f.weight).to(dtype)
            return functional.linear(hidden, self.backbone.embeddings.weight).float()
