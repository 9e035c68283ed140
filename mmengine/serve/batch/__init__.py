"""Runs prompt batches through an engine: request files, answer files, and the batch loop."""
