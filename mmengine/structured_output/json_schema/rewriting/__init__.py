"""Rewrite a schema's keywords into shapes: alternatives that hold a constraint for each JSON type."""
