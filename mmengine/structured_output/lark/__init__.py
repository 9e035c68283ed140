"""Parses the Lark grammars of custom tools, and converts them to grammars for JSON strings."""
