"""Many prompts through one engine: request files, answer files, and the bounded window in flight."""
