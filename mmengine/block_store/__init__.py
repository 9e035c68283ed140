"""Stores for KV blocks outside the engine's process, so that other processes can reuse the blocks."""
