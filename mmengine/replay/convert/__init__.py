"""Converts a log for other programs and for publication."""
