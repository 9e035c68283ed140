"""The constraints on values with a single JSON type, and the conclusions from them."""
