"""The xgrammar grammar backend (backend.py). Writes schemas, regular expressions, numbers and words as
xgrammar's EBNF, and notes on its limits (order_notes.py). Only backend.py imports xgrammar.
"""
