"""Structured output: the grammars that a request may ask for, their compilation, and the tokens that they
allow.
"""
