"""Many prompts through a single engine: request files, answer files, and the bounded window in flight."""
