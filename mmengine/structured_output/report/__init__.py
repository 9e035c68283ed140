"""Reports how a schema is enforced: exactly, approximately, or not at all."""
