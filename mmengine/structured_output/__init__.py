"""Structured output: reads the grammar that a request asks for, compiles it, and masks the tokens."""
