"""OpenAI's Responses API: bodies, events, and response objects."""
