"""Cross-origin calls from pages in browsers, as the Fetch standard defines them."""

from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp

# Headers that a script may read in addition to the standard's safelisted headers.
EXPOSED = (
    *("x-request-id", "request-id", "x-mmengine-ignored-fields", "x-mmengine-unenforced-tools"),
    *("retry-after", "x-should-retry", "traceparent", "content-disposition"),
)
_METHODS = ("GET", "POST", "DELETE")


def with_cors(app: ASGIApp, origins: tuple[str, ...]) -> ASGIApp:
    """Return an application that answers preflights from these origins and lets them read answers.

    A preflight has no API key, so it is answered before keys are checked. Cookies are never allowed. Chromium
    asks in a preflight whether a public page may call a server in a private network. The listed origins may.
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
