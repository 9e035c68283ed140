"""KV events: the changes to the KV cache in a log, in the format that vLLM's routers read."""
