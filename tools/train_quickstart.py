"""Train the bundled byte-level model on the Python standard library's sources.

    python tools/train_quickstart.py --data LIB_OR_TAR [LIB_OR_TAR ...] --out DIR --minutes 7

`--data` names library folders (or tars of one), newest version first; each path is taken once. One
document is one file: the token 256, then its bytes. Files are held out by a hash of their path, and
those whose text also occurs in training files are left out of a second, stricter score.
Writes config.json, model.safetensors (bfloat16) and training.json (data, seed, steps, versions,
held-out bits per byte). With `--steps` the schedule is fixed; otherwise the first steps are timed
and their number is chosen to fit `--minutes`. `--tiny` tries everything out on a CPU in seconds.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import sysconfig
import tarfile
import time
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file
from torch.nn import functional
from training_model import CONFIG, TrainingModel

END = 256
LEFT_OUT = ("site-packages", "__pycache__", "lib2to3/tests/data", "test/encoded_modules")


def sources(place: Path) -> dict[str, bytes]:
    """Relative path to content of every Python source file but those of `LEFT_OUT`."""
    found: dict[str, bytes] = {}
    if place.is_dir():
        for path in place.rglob("*.py"):
            found[path.relative_to(place).as_posix()] = path.read_bytes()
    else:
        with tarfile.open(place) as archive:
            for member in archive.getmembers():
                if member.isfile() and member.name.endswith(".py"):
                    found[member.name] = archive.extractfile(member).read()
    return {name: text for name, text in found.items() if not any(map(name.count, LEFT_OUT))}


def documents(places: list[Path]) -> dict[str, bytes]:
    """Sources of all places by sorted path; where two have a path, the earlier place's."""
    found: dict[str, bytes] = {}
    for place in reversed(places):
        found |= sources(place)
    return {name: found[name] for name in sorted(found) if 64 <= len(found[name]) <= 400_000}


def held_out(name: str) -> bool:
    return int(hashlib.sha256(name.encode()).hexdigest(), 16) % 40 == 0


def shared(texts: list[bytes], known: list[bytes], run: int = 3) -> list[float]:
    """Of each text, the part (0 to 1) in runs of non-blank lines that a known text has too."""

    def runs(text: bytes) -> list[int]:
        lines = [line for line in text.split(b"\n") if line.strip()]
        return [hash(tuple(lines[k : k + run])) for k in range(len(lines) - run + 1)]

    seen = {key for text in known for key in runs(text)}
    parts = []
    for text in texts:
        sizes = np.array([len(line) + 1 for line in text.split(b"\n") if line.strip()])
        hit = np.zeros(len(sizes), dtype=bool)
        for k, key in enumerate(runs(text)):
            hit[k : k + run] |= key in seen
        parts.append(float(sizes[hit].sum() / max(1, sizes.sum())))
    return parts


def pack(texts: list[bytes]) -> np.ndarray:
    parts = []
    for text in texts:
        parts += [np.array([END], dtype=np.int16), np.frombuffer(text, dtype=np.uint8)]
    parts.append(np.array([END], dtype=np.int16))
    return np.concatenate(parts).astype(np.int16)


@torch.no_grad()
def bits_per_byte(model, texts: list[bytes], device, window: int = 4096, most: int = 2**21):
    """Mean bits per byte, each window of a file read afresh; at most `most` bytes."""
    total, count = 0.0, 0
    for text in texts:
        tokens = pack([text])[:-1].astype(np.int64)
        for start in range(0, len(tokens) - 1, window):
            part = torch.from_numpy(tokens[start : start + window + 1]).to(device)
            inputs = functional.pad(part[:-1], (0, -(len(part) - 1) % 64))
            loss = functional.cross_entropy(
                model(inputs[None])[0, : len(part) - 1], part[1:], reduction="sum"
            )
            total += float(loss) / math.log(2)
            count += len(part) - 1
        if count >= most:
            break
    return total / max(1, count), count


def save(model: TrainingModel, config: dict, out: Path) -> None:
    out.mkdir(parents=True, exist_ok=True)
    tensors = {
        name: value.detach().to(torch.bfloat16).cpu().contiguous()
        for name, value in model.state_dict().items()
    }
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    (out / "config.json").write_text(json.dumps(config, indent=2) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--data", type=Path, nargs="+", default=[Path(sysconfig.get_path("stdlib"))]
    )
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--minutes", type=float, default=7.0)
    parser.add_argument("--steps", type=int)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--lr", type=float, default=4e-3)
    parser.add_argument("--weight-decay", type=float, default=0.1)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--layers", type=int, default=CONFIG["num_hidden_layers"])
    parser.add_argument("--no-compile", action="store_true")
    parser.add_argument("--tiny", action="store_true", help="2 layers, little data: a trial")
    args = parser.parse_args()
    if args.tiny:
        args.layers, args.batch, args.length = 2, 2, 128

    torch.manual_seed(args.seed)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    config = {**CONFIG, "num_hidden_layers": args.layers}
    texts = documents(args.data)
    train = [text for name, text in texts.items() if not held_out(name)]
    test = [text for name, text in texts.items() if held_out(name)]
    if args.tiny:
        train, test = train[:50], sorted(test, key=len)[:5]
    apart = [text for text, part in zip(test, shared(test, train), strict=True) if part < 0.1]
    stream = torch.from_numpy(pack(train).astype(np.int64)).to(device)
    print(f"{len(train)} files, {len(stream)} tokens; held out {len(test)} files", flush=True)

    model = TrainingModel(config).to(device)
    parameters = sum(p.numel() for p in model.parameters())
    plain = [p for n, p in model.named_parameters() if p.ndim < 2 or "conv1d" in n]
    decayed = [p for n, p in model.named_parameters() if not (p.ndim < 2 or "conv1d" in n)]
    optimizer = torch.optim.AdamW(
        [
            {"params": decayed, "weight_decay": args.weight_decay},
            {"params": plain, "weight_decay": 0.0},
        ],
        lr=args.lr,
        betas=(0.9, 0.95),
        fused=device == "cuda",
    )
    dtype = torch.bfloat16 if device == "cuda" else torch.float32

    def loss_of(rows: torch.Tensor) -> torch.Tensor:
        logits = model(rows[:, :-1], dtype)
        return functional.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten())

    step_loss = loss_of if args.no_compile or device == "cpu" else torch.compile(loss_of)
    generator = torch.Generator(device=device).manual_seed(args.seed)
    span = torch.arange(args.length + 1, device=device)
    steps, timed, probe = args.steps, None, 60
    begun = time.perf_counter()
    deadline = begun + 60 * args.minutes
    losses, step, saved = [], 0, begun
    while steps is None or step < steps:
        total = steps or 10_000
        warm = min(1.0, (step + 1) / 200)
        for group in optimizer.param_groups:
            group["lr"] = args.lr * warm * (1 - step / total)
        starts = torch.randint(
            len(stream) - args.length - 1, (args.batch, 1), generator=generator, device=device
        )
        loss = step_loss(stream[starts + span])
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(loss.detach())
        step += 1
        if steps is None and step in (20, probe):
            float(losses[-1])
            if step == 20:
                timed = time.perf_counter()
            else:
                now = time.perf_counter()
                each = (now - timed) / (probe - 20)
                steps = step + int((deadline - now - 15) / each)
                print(f"{each * 1e3:.1f} ms a step, {steps} steps", flush=True)
        if step % 250 == 0 or step == steps:
            mean = float(torch.stack(losses).mean()) / math.log(2)
            losses = []
            now = time.perf_counter()
            print(f"step {step}/{steps} bits/byte {mean:.3f} {now - begun:.0f} s", flush=True)
            if now - saved > 60:
                save(model, config, args.out)
                saved = now
        if args.steps is None and time.perf_counter() > deadline + 20:
            print("out of time", flush=True)
            break
    save(model, config, args.out)

    with torch.no_grad():
        for value in model.parameters():
            value.copy_(value.to(torch.bfloat16))
    bits, counted = bits_per_byte(model, test, device)
    apart_bits, apart_counted = bits_per_byte(model, apart, device)
    record = {
        "parameters": parameters,
        "held_out_bits_per_byte": round(bits, 4),
        "held_out_files": len(test),
        "held_out_bytes_scored": counted,
        "apart_bits_per_byte": round(apart_bits, 4),
        "apart_files": len(apart),
        "apart_bytes_scored": apart_counted,
        "train_files": len(train),
        "train_bytes": sum(map(len, train)),
        "steps": step,
        "batch": args.batch,
        "length": args.length,
        "lr": args.lr,
        "weight_decay": args.weight_decay,
        "seed": args.seed,
        "minutes": round((time.perf_counter() - begun) / 60, 2),
        "device": torch.cuda.get_device_name() if device == "cuda" else "cpu",
        "torch": torch.__version__,
    }
    (args.out / "training.json").write_text(json.dumps(record, indent=2) + "\n")
    print(json.dumps(record), flush=True)


if __name__ == "__main__":
    main()
