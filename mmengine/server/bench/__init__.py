"""A load on a server that speaks OpenAI's chat API, ours or another one, and how it bore it."""
