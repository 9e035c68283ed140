"""The grammar backend xgrammar (backend.py). Writes schemas, regular expressions, numbers and words in
xgrammar's EBNF, and tells callers in an answer's notes where xgrammar allows less than the schema
(order_notes.py). Only backend.py imports xgrammar.
"""
