"""`Engine`: the single-threaded engine, with typed answers and sessions."""
