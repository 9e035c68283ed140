"""The grammar backend xgrammar (backend.py). Writes schemas, regular expressions, numbers and words in
xgrammar's EBNF, and adds notes to the response where xgrammar accepts fewer texts than the schema
(order_notes.py). Only backend.py imports xgrammar.
"""
