"""Translates grammars in llama.cpp's GBNF or xgrammar's EBNF to a Lark grammar or a regex."""
