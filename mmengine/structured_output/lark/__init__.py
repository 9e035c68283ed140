"""Parses the Lark grammars of custom tools. Converts each to a grammar for a JSON string whose value matches
the original grammar.
"""
