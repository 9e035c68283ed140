"""Completes structured answers before their token budget ends."""
