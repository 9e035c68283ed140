"""Grammars written in EBNF (the GBNF that xgrammar reads): of schemas, regular expressions and words."""
