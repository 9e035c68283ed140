"""Write shapes as the JSON Schema subset that grammar engines enforce exactly."""
