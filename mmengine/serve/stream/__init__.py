"""Carries outputs from the engine's thread to callers' event loops, and records complete answers."""
