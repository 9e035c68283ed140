"""A model cut over several ranks (docs/gpu.md)."""
