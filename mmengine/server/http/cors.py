"""Lets web pages from other origins send calls (CORS in the Fetch standard)."""

from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp

# Response headers that a script may read in addition to the headers that CORS always allows.
EXPOSED = (
    *("x-request-id", "request-id", "x-mmengine-ignored-fields", "x-mmengine-unenforced-tools"),
    *("retry-after", "x-should-retry", "traceparent", "content-disposition"),
)
_METHODS = ("GET", "POST", "DELETE")


def with_cors(app: ASGIApp, origins: tuple[str, ...]) -> ASGIApp:
    """Return an application that answers preflight requests from `origins`, and lets pages of these origins
    read responses.

    A preflight has no API key, so the application must run before the key check. Cookies are never allowed.
    Chromium's additional preflight for servers in private networks is also allowed.
    """
    if not origins:
        return app
    return CORSMiddleware(
        app,
        allow_origins=origins,
        allow_methods=_METHODS,
        allow_headers=("*",),
        allow_private_network=True,
        expose_headers=EXPOSED,
    )
