"""Parses the Lark grammars of custom tools, and converts each to a grammar for a JSON string with a matching
value.
"""
