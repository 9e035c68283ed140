"""JSON Schema's keywords, drafts and formats, and the refusals and notes that name them."""
