"""Options that allow media URLs, for `mmengine run`, `chat`, `embed` and `serve`."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import typer

from mmengine.errors import InvalidRequest

if TYPE_CHECKING:  # Heavy; loaded when a command runs.
    from mmengine.processing.fetch.fetcher import MediaFetcher
    from mmengine.processing.fetch.limits import FetchLimits

MEDIA = "Media by URL"
URL_HEADS = ("http://", "https://")


@dataclass(frozen=True, slots=True)
class MediaUrls:
    """Options for fetching media URLs."""

    allow_media_urls: Annotated[
        list[str] | None,
        typer.Option(
            rich_help_panel=MEDIA,
            metavar="HOST",
            help="Host from which https: URLs are fetched, such as images.example.org or '*.example.org'; "
            "may be repeated. public: all hosts on the internet. Addresses in this network are never "
            "fetched.",
        ),
    ] = None
    allow_http_media: Annotated[
        bool,
        typer.Option(
            "--allow-http-media", rich_help_panel=MEDIA, help="Also fetch http: URLs from these hosts."
        ),
    ] = False
    media_ports: Annotated[
        list[int] | None,
        typer.Option(
            rich_help_panel=MEDIA,
            metavar="PORT",
            help="Allowed port; may be repeated (default: 80 and 443).",
        ),
    ] = None
    media_timeout_s: Annotated[
        float, typer.Option(rich_help_panel=MEDIA, help="Timeout per URL in seconds.")
    ] = 10.0
    max_media_bytes: Annotated[
        int, typer.Option(rich_help_panel=MEDIA, help="Maximum size per URL or file in bytes.")
    ] = 64 * 2**20
    max_media_urls: Annotated[
        int,
        typer.Option(rich_help_panel=MEDIA, help="Maximum number of URLs per call, or per line of a batch."),
    ] = 64
    max_media_fetches: Annotated[
        int, typer.Option(rich_help_panel=MEDIA, help="Maximum number of concurrent fetches.")
    ] = 16
    max_media_in_flight_bytes: Annotated[
        int,
        typer.Option(rich_help_panel=MEDIA, help="Maximum bytes of fetched media that are not prepared yet."),
    ] = 2**30

    def media_options(self) -> "dict[str, MediaFetcher] | None":
        """Return prompt options with a media fetcher, or None if no host is allowed. Raises ConfigError."""
        if not self.allow_media_urls:
            return None
        from mmengine.processing.fetch.fetcher import MediaFetcher  # Lazy: help needs no ssl

        return {"urls": MediaFetcher(self._limits())}

    def check(self, sources: list[str]) -> None:
        """Raise InvalidRequest if a URL in `sources` is not allowed. The error names the options that would
        allow the URL.
        """
        if not any(name[:8].lower().startswith(URL_HEADS) for name in sources):
            return
        from mmengine.processing.fetch.refusals import FetchRefused  # Lazy: help needs no idna
        from mmengine.processing.fetch.urls import parse_url

        limits = self._limits()
        for name in sources:
            try:
                url = parse_url(name)
            except FetchRefused:  # A path, or an invalid URL whose error the fetcher reports.
                continue
            lacks = {
                f"--allow-media-urls {url.host} (or public)": not limits.allows_host(url.host),
                "--allow-http-media": url.scheme == "http" and not limits.http,
                f"--media-ports {url.port}": url.port not in limits.ports,
            }
            if options := [option for option, is_lacking in lacks.items() if is_lacking]:
                raise InvalidRequest(f"the URL {name[:200]} is not allowed; give {' '.join(options)}")

    def _limits(self) -> "FetchLimits":
        """Return the limits for the fetcher. Raises ConfigError."""
        from mmengine.processing.fetch.limits import DEFAULT_PORTS, FetchLimits, hosts_of  # Lazy: idna

        return FetchLimits(
            hosts=hosts_of(self.allow_media_urls),
            http=self.allow_http_media,
            ports=tuple(self.media_ports or DEFAULT_PORTS),
            timeout_s=self.media_timeout_s,
            max_bytes=self.max_media_bytes,
            max_urls=self.max_media_urls,
            max_fetches=self.max_media_fetches,
            max_bytes_in_flight=self.max_media_in_flight_bytes,
        )
