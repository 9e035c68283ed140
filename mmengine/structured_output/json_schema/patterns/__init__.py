"""Reads ECMA-262 patterns and rewrites them so that all regex engines agree on their meaning."""
