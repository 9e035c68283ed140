"""Rewrites a schema's keywords into shapes. A shape has a constraint for each allowed JSON type."""
