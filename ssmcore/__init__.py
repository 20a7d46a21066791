"""ssmcore: the open, pluggable core for serving Mamba-2 (state-space) language models."""

from ssmcore.hookspecs import hookimpl

__version__ = "0.1.0"
__all__ = ["__version__", "hookimpl"]
