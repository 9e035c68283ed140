"""Passes outputs from the engine's thread to callers' event loops, and stores complete answers."""
