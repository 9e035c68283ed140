"""`Engine` runs the model on the caller's thread, returns typed answers, and opens sessions."""
