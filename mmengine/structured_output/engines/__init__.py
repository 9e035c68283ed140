"""Grammar engines compile grammars and compute token masks. This package has their interface (base.py), their
registry (backends.py), and the engine llguidance.
"""
