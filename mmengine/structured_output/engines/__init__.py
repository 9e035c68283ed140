"""Grammar engines, which compile grammars and compute token masks: interface (base.py), registry,
llguidance.
"""
