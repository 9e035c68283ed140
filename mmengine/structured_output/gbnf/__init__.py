"""Translate llama.cpp's GBNF and xgrammar's EBNF into Lark or a regex for the grammar engine."""
