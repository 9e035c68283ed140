"""Streams of outputs, from the engine's thread to callers' event loops, and records of complete answers."""
