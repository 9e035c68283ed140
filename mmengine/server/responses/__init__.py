"""OpenAI's Responses API: its bodies, its events, and the objects that both make."""
