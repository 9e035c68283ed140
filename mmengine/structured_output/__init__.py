"""Structured output: reads the grammar in a request, compiles the grammar, and masks forbidden tokens."""
