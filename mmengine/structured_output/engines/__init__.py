"""What a grammar engine brings (base.py), and which there are (backends.py)."""
