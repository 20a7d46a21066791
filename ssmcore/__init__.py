"""ssmcore: the open, pluggable core for serving Mamba-2 (state-space) language models.

Public names are imported when first used, so that `import ssmcore` costs little and needs no torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from ssmcore.hookspecs import hookimpl

if TYPE_CHECKING:
    from ssmcore.engine.engine import Engine
    from ssmcore.engine.requests import SamplingParams
    from ssmcore.pipeline import Pipeline
    from ssmcore.registry import Registry
    from ssmcore.settings import Settings
    from ssmcore.step import Step

__version__ = "0.1.0"

__all__ = [
    "Engine",
    "Pipeline",
    "Registry",
    "SamplingParams",
    "Settings",
    "Step",
    "__version__",
    "hookimpl",
]

_MODULES = {
    "Engine": "ssmcore.engine.engine",
    "Pipeline": "ssmcore.pipeline",
    "Registry": "ssmcore.registry",
    "SamplingParams": "ssmcore.engine.requests",
    "Settings": "ssmcore.settings",
    "Step": "ssmcore.step",
}


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return getattr(import_module(_MODULES[name]), name)
    raise AttributeError(f"module 'ssmcore' has no attribute {name!r}")
