"""JSON Schema's keywords, drafts and formats, and the types of refusals and notes about a schema."""
