"""OpenAI's chat and completions APIs: bodies become parsed requests, answers become frames and JSON."""
