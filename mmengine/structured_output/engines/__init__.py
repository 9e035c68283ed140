"""Grammar engines: their interface (base.py) and their registry (backends.py)."""
