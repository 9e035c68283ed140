"""HTTP connections: uvicorn's protocol with our limits, server-sent events, and other ASGI servers."""
