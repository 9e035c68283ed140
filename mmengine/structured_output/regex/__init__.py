"""Parses regular expressions to syntax trees, and builds automata from the trees. Grammar parsers use the
trees too.
"""
