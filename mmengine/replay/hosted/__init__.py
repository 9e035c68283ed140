"""Logs whose decisions another engine's scheduler made: reads their steps, and derives them by that engine's
rules. docs/reference/recorded-logs.md describes the form of such a log.
"""
