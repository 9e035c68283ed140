"""Rewrite the keywords of a schema into shapes: alternatives that hold a constraint for each JSON type."""
