"""Compiles the grammars of running requests, and keeps the grammar state of each row in the batch."""
