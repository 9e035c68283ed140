"""Structured output: which grammars may be asked for, how they are compiled, and which tokens they allow."""
