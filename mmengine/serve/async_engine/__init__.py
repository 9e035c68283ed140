"""`AsyncEngine`: the engine on a thread of its own, for many callers of an event loop."""
