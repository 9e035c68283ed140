"""Prompts and options as callers pass them, and the core's requests that are made from them.

Knows the shapes of prompts, tools and answer formats. Must not know an engine or an answer.
"""
