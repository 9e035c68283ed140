"""Converts a log's records of KV cache changes to KV events, in the format that vLLM's routers read."""
