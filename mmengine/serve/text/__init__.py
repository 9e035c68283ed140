"""From token ids to text: detokenization, stop strings, reasoning, tool calls, and outputs for callers.

Pure functions and small state machines over tokens. Must not know threads, streams or an engine.
"""
