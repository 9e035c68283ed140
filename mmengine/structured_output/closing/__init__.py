"""How a text is completed within its budget: what is shortest, and where it may still end."""
