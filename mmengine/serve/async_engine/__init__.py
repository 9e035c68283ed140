"""`AsyncEngine` steps the engine on its own thread and serves many concurrent asyncio callers."""
