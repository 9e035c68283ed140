"""Reads, checks and rewrites JSON Schemas, so that a grammar engine can enforce them exactly."""
