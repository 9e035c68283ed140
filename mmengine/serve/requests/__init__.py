"""The resources that an engine holds for a request from submission to its end, and reports about them.

Pixels, grammars, adapters, sessions, metrics, health and crash recovery. Must not know how callers wait.
"""
