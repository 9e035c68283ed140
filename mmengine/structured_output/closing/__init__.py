"""Complete a text within its token budget: find the shortest completion, and where the text may still end."""
