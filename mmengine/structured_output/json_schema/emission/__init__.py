"""Write shapes as the part of JSON Schema that grammar engines enforce exactly."""
