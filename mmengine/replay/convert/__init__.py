"""Converts a log to the formats of other programs, and redacts a log for publication."""
