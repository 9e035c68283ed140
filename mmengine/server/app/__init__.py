"""The ASGI application: routes, the OpenAPI document, and service endpoints."""
