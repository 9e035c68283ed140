"""The HTTP server. Needs the extra `serve`; nothing below `mmengine.server` knows HTTP.

The packages, lowest first: http, storage, transport, chat, calls, messages, responses, live, answers,
batches, sessions, app, lifecycle. `bench` is a load generator that imports none of them.
"""
