"""xgrammar as a grammar backend (backend.py), the writers of the EBNF that it reads, of schemas, regular
expressions, numbers and words, and what is said of it (notes.py). They never import xgrammar."""
