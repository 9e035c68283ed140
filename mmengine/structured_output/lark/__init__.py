"""Lark grammars of custom tools, read into rules and spelled for a text within a JSON string."""
