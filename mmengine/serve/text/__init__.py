"""Converts generated token ids to text: detokenization, stop strings, reasoning, tool calls, and outputs.

The modules are pure functions and small state machines over tokens. They must not depend on threads, streams
or an engine.
"""
