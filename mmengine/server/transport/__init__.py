"""HTTP connections: uvicorn's protocol with limits for clients, server-sent events, and support for other
ASGI servers.
"""
