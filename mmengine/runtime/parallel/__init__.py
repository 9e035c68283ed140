"""A model cut over several ranks (docs/how-to/gpu.md)."""
