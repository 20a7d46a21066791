"""The engine: continuous batching over real checkpoints."""
