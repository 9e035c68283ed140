"""Grammar engines, which compile grammars and compute token masks: their interface (base.py), their registry
(backends.py), and the engine llguidance.
"""
