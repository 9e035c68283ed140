"""The engine as a Python library: callers pass prompts and get generated answers.

`Engine` runs on the caller's thread, `AsyncEngine` serves many callers, and `Pipeline` replaces transformers'
pipeline. In the following list, each package imports only packages to its left: prompt, text, requests,
stream, pooling, batch, chat, engine, async_engine, pipeline, extraction. No module in `mmengine.serve` may
depend on HTTP.
"""
