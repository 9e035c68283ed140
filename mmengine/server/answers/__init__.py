"""The routes that create answers: chat completions, completions, responses, and messages."""
