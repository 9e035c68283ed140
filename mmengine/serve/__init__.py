"""The engine as a Python library: callers pass prompts and get generated answers.

`Engine` runs on the caller's thread, `AsyncEngine` serves many callers, and `Pipeline` replaces transformers'
pipeline. A package in this list imports only packages that come before it: prompt, text, requests, stream,
batch, chat, engine, async_engine, pipeline. No module here may depend on HTTP.
"""
