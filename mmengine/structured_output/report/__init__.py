"""Reports how exactly a schema can be enforced: exactly, approximately, or not at all."""
