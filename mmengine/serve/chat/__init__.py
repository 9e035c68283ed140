"""Builds OpenAI-style chat responses from generated tokens: messages, tool calls, reasoning and chunks."""
