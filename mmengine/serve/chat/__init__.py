"""Answers in the formats of OpenAI's chat API: messages, tool calls, reasoning, and stream chunks."""
