"""Grammars as llama.cpp (GBNF) and xgrammar (EBNF) write them, as Lark or a regex for the grammar engine."""
