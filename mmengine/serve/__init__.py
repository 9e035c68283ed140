"""The engine as a library: prompts in, answers out.

`Engine` runs on the caller's thread, `AsyncEngine` serves many callers, and `Pipeline` replaces transformers'
pipeline. The packages, lowest first: prompt, text, requests, stream, batch, chat, engine, async_engine,
pipeline. A package imports only packages that come before it in this list. This package must not know HTTP.
"""
