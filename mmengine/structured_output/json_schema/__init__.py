"""JSON Schemas: one is read, checked, and written anew so that a grammar engine enforces it exactly."""
