"""xgrammar as a grammar backend (backend.py), and the writers of the EBNF that it reads: of schemas, regular
expressions, numbers and words. They never import xgrammar."""
