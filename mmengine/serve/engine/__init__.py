"""`Engine` runs the model on the caller's thread and returns typed answers."""
