"""Constraints on each JSON type's values, and functions that compare constraints and list or count values."""
