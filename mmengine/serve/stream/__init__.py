"""Output streams, from the engine's thread to callers' event loops, and complete answers' records."""
