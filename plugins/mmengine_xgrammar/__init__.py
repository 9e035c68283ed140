"""The xgrammar grammar backend (backend.py), with writers of its EBNF for schemas, regular expressions,
numbers and words, and notes on its limits (notes.py). Only backend.py imports xgrammar.
"""
