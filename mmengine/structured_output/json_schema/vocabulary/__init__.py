"""JSON Schema's vocabulary: keywords, drafts, formats; and the refusals and notes that name them."""
