"""The grammar backend xgrammar (backend.py). Writes schemas, regular expressions, numbers and words in
xgrammar's EBNF, and writes notes on xgrammar's limits (order_notes.py). Only backend.py imports xgrammar.
"""
