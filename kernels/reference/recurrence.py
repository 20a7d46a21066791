"""The plainest form of each kernel, token by token, one row at a time: what all others are held to.

Meant for float64 and small shapes; never for running a model.
"""

from __future__ import annotations

import torch


def conv_recurrence(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    window: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Causal convolution with SiLU of one row.

    Args:
        x: (tokens, conv_dim); weight: (conv_dim, d_conv); bias: (conv_dim,) or None.
        window: (d_conv - 1, conv_dim), inputs before the first, or None for zeros.

    Returns:
        y: (tokens, conv_dim), and the window after every token: (tokens, d_conv - 1, conv_dim).
    """
    past = weight.shape[1] - 1
    window = x.new_zeros(past, x.shape[1]) if window is None else window.to(x.dtype)
    outputs, windows = [], []
    for token in x:
        seen = torch.cat([window, token[None]])
        y = (seen * weight.t()).sum(0)
        outputs.append(torch.nn.functional.silu(y if bias is None else y + bias))
        window = seen[1:]
        windows.append(window)
    return torch.stack(outputs), torch.stack(windows)


def ssd_recurrence(
    x: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    *,
    D: torch.Tensor,
    dt_bias: torch.Tensor,
    dt_limit: tuple[float, float] = (0.0, float("inf")),
    state: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The state-space recurrence of one row.

    Args:
        x: (tokens, heads, headdim); dt: (tokens, heads), raw; A, D, dt_bias: (heads,).
        B, C: (tokens, groups, dstate); head `h` uses group `h // (heads // groups)`.
        state: (heads, headdim, dstate) before the first token, or None for zeros.

    Returns:
        y: (tokens, heads, headdim), and the state after every token:
        (tokens, heads, headdim, dstate).
    """
    tokens, heads, headdim = x.shape
    groups, dstate = B.shape[1:]
    dt = dt + dt_bias
    dt = torch.logaddexp(dt, torch.zeros_like(dt)).clamp(*dt_limit)
    state = x.new_zeros(heads, headdim, dstate) if state is None else state.to(x.dtype)
    outputs, states = [], []
    for t in range(tokens):
        new, y = [], []
        for head in range(heads):
            group = head // (heads // groups)
            decay = torch.exp(dt[t, head] * A[head])
            added = dt[t, head] * torch.outer(x[t, head], B[t, group])
            new.append(decay * state[head] + added)
            y.append(new[head] @ C[t, group] + D[head] * x[t, head])
        state = torch.stack(new)
        outputs.append(torch.stack(y))
        states.append(state)
    return torch.stack(outputs), torch.stack(states)
