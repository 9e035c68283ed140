"""Read, check and rewrite JSON Schemas so that a grammar engine enforces them exactly."""
