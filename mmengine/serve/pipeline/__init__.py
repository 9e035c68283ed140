"""Replaces transformers' image-text-to-text pipeline, with the same calls, options and results."""
