"""KV events: what a log says of the KV cache, in the words of vLLM's routers."""
