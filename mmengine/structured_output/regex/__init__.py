"""Parses regular expressions to syntax trees, and builds automata from these trees. Grammar parsers use the
trees too.
"""
