"""Prompt batches for a single engine: request files, answer files, and the loop with a bounded window."""
