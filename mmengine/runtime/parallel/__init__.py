"""Shard a model over several ranks (docs/how-to/gpu.md)."""
