"""Shards a model over several ranks. A rank is a process that uses one device (docs/how-to/gpu.md)."""
