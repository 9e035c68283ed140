"""Data types for constraints on JSON values, and functions that intersect, compare and list values."""
