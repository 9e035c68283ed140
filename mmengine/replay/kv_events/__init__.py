"""KV events: a log's changes to the KV cache, in the format that vLLM's routers read."""
