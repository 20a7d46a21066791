"""Small inputs for kernels, and what a row of them must give, token by token in float64."""

from __future__ import annotations

import torch
from ssmcore_kernels.reference.recurrence import ssd_recurrence

NAN = float("nan")
NO_LIMIT = (0.0, float("inf"))
# heads, headdim, dstate, groups
SHAPES = [(4, 8, 16, 1), (6, 5, 3, 2), (6, 4, 8, 3), (3, 80, 4, 3)]


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def ints(values):
    return torch.tensor(list(values), dtype=torch.int32)


def bools(values):
    return torch.tensor(list(values), dtype=torch.bool)


def draw(gen, *size, dtype=torch.float64):
    return torch.randn(size, generator=gen, dtype=torch.float64).to(dtype)


def offsets(lengths):
    """Packed offsets of rows of these lengths, a list."""
    loc = [0]
    for length in lengths:
        loc.append(loc[-1] + length)
    return loc


class MixerInputs:
    """x, dt, B and C of some tokens as views of wider buffers, and the mixer's A, D and dt_bias."""

    def __init__(self, gen, tokens, shape, dtype=torch.float64, dt_limit=NO_LIMIT):
        heads, headdim, dstate, groups = shape
        wide = torch.promote_types(dtype, torch.float32)
        inner = heads * headdim
        merged = draw(gen, tokens, inner + 2 * groups * dstate, dtype=dtype)
        bc = merged[:, inner:].view(tokens, 2, groups, dstate)
        self.x = merged[:, :inner].view(tokens, heads, headdim)
        self.B, self.C = bc[:, 0], bc[:, 1]
        self.dt = draw(gen, tokens, 3 + heads, dtype=dtype)[:, 3:]
        self.A = -torch.exp(draw(gen, heads)).to(wide)
        self.rest = {
            "D": draw(gen, heads).to(wide),
            "dt_bias": draw(gen, heads).to(wide),
            "dt_limit": dt_limit,
        }

    def run(self, kernel, part=slice(None), **arguments):
        tokens = [tensor[part] for tensor in (self.x, self.dt, self.B, self.C)]
        x, dt, B, C = tokens
        return kernel(x, dt, self.A, B, C, **self.rest, **arguments)

    def oracle(self, part=slice(None), state=None):
        """y and the state after every token of one row, in float64."""
        x, dt, B, C = (tensor[part].double() for tensor in (self.x, self.dt, self.B, self.C))
        rest = {name: self.rest[name].double() for name in ("D", "dt_bias")}
        rest["dt_limit"] = self.rest["dt_limit"]
        state = None if state is None else state.double()
        return ssd_recurrence(x, dt, self.A.double(), B, C, **rest, state=state)


def chunk_metadata(lengths, computed, size):
    """Chunks that end at multiples of `size` of each row's own position, and each row's last."""
    cu, seq_idx, last = [0], [], []
    for row, (length, start) in enumerate(zip(lengths, computed, strict=True)):
        at = start
        while at < start + length:
            end = min(at // size * size + size, start + length)
            cu.append(cu[-1] + end - at)
            seq_idx.append(row)
            at = end
        last.append(len(seq_idx) - 1)
    return {"cu_chunk_seqlens": ints(cu), "seq_idx": ints(seq_idx)}, last


def poisoned(slots, *shape, dtype=torch.float64, but=(), gen=None):
    """A pool of slots that hold NaN, random values in the slots of `but`."""
    pool = torch.full((slots, *shape), NAN, dtype=dtype)
    for slot in but:
        pool[slot] = draw(gen or generator(slot), *shape, dtype=dtype)
    return pool


def same_bits(got, want):
    """Equal, NaN where NaN."""
    return torch.equal(got.isnan(), want.isnan()) and torch.equal(
        got.nan_to_num(), want.nan_to_num()
    )


def assert_untouched(pool, before, written):
    """Every slot but those of `written` is what it was."""
    kept = [slot for slot in range(len(pool)) if slot not in set(written)]
    assert same_bits(pool[kept], before[kept])
