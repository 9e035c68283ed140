"""A scheduler that decides like vLLM, for comparisons. The setting `compat` "vllm" selects it."""
