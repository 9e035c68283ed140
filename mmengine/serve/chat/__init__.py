"""Answers in OpenAI's chat API shapes: messages, tool calls, reasoning, and stream chunks."""
