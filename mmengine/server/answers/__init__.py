"""The routes that generate answers: chat completions, completions, responses, and messages."""
