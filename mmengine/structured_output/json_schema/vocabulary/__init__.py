"""The words of JSON Schema: keywords, drafts, formats; and the refusals and notes that name them."""
