"""`AsyncEngine`: the engine on its own thread, for many callers on event loops."""
