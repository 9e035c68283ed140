"""`Engine`: the engine for one thread, with typed answers and sessions."""
