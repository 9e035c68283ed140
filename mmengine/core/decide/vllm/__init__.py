"""vLLM's decisions, for comparisons: the scheduler of the setting `compat` "vllm"."""
