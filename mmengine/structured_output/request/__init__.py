"""Reads the requested output format: `response_format`, `grammar`, structural tags, and tool calls.

The package also defines the form in which the log stores an output format.
"""
