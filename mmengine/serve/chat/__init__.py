"""Answers in the shapes of OpenAI's chat API: messages, tool calls, reasoning, and stream chunks."""
