"""Recorded logs. A recorded log contains the decisions that another engine's scheduler made; this engine is
called the host. The package reads the steps of a recorded log, and derives the steps again with the host's
rules. docs/reference/recorded-logs.md describes the log's format.
"""
