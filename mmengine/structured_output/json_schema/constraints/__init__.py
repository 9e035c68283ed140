"""Constraints on the values of a JSON type, and functions that compare them and list or count their
values.
"""
