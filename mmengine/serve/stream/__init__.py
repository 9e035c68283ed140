"""The way of an answer from the engine's thread to a caller's event loop."""
