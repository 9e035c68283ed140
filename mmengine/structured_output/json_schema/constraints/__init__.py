"""The constraints on values of one JSON type, and what follows from them."""
