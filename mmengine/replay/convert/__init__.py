"""A log in other forms: for other programs, and for posting in public."""
