"""Writes shapes as the subset of JSON Schema that grammar engines enforce exactly."""
