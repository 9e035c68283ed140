"""Shards a model over several ranks: processes that each use one device (docs/how-to/gpu.md)."""
