"""Structured output: reads the grammar in a request, compiles the grammar, and masks the tokens that it
forbids.
"""
