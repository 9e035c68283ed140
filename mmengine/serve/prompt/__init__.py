"""Prompts and options as callers pass them, and the core's requests that are made from them.

Knows the shapes that prompts, tools and answer formats have. Must not know an engine or an answer.
"""
