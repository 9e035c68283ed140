"""Converts generated token ids to text: detokenization, stop strings, reasoning, tool calls, and outputs.

The modules must not depend on threads, streams or an engine.
"""
