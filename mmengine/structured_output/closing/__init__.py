"""Completes a grammar's text before the token budget ends, so that no answer is cut in the middle."""
