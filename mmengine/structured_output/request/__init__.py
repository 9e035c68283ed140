"""Reads the requested output format: `response_format`, `grammar`, structural tags, and tool calls.

The package also defines how the log stores a format.
"""
