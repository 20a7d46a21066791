"""Which device `engine.device` means here."""

from __future__ import annotations

from ssmcore.errors import UnavailableError


def resolve_device(device: str) -> str:
    """`cpu` or `cuda:N` for a setting of `engine.device`.

    Raises:
        UnavailableError: a GPU was asked for that is not here.
    """
    if device == "cpu":
        return device
    import torch

    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if device == "auto":
        return "cuda:0" if count else "cpu"
    index = int(device.partition(":")[2] or 0)
    if index >= count:
        raise UnavailableError(
            f"engine.device = {device!r}: torch {torch.__version__} sees {count} GPUs here;"
            " use engine.device = 'cpu', or install a CUDA build of torch"
        )
    return f"cuda:{index}"
