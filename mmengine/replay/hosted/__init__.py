"""Recorded logs. A recorded log contains the decisions that another engine's scheduler made. The other engine
is called the host. The package reads the log's steps, and derives the steps again with the host's rules.
docs/reference/recorded-logs.md describes the log's format.
"""
