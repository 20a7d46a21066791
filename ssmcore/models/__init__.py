"""Mamba-2 language models: configuration, weights, tokenizers, forward pass."""
