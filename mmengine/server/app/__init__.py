"""The ASGI application: dispatch of calls to routes, the OpenAPI document, and service endpoints."""
