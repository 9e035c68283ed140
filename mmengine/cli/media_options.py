"""Options of `mmengine run` and `mmengine serve` that open the door to media by URL."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import typer

from mmengine.errors import InvalidRequest

if TYPE_CHECKING:  # heavy: loaded when a command runs
    from mmengine.processing.fetch.fetcher import MediaFetcher
    from mmengine.processing.fetch.limits import FetchLimits

MEDIA = "Media by URL"
URL_HEADS = ("http://", "https://")


@dataclass(frozen=True, slots=True)
class MediaUrls:
    """What may be fetched."""

    allow_media_urls: Annotated[
        list[str] | None,
        typer.Option(
            rich_help_panel=MEDIA,
            metavar="HOST",
            help="Fetch https: URLs of this host, as images.example.org or '*.example.org'; may be repeated. "
            "public: of all hosts on the internet. Never of addresses of this network.",
        ),
    ] = None
    allow_http_media: Annotated[
        bool, typer.Option("--allow-http-media", rich_help_panel=MEDIA, help="http: URLs of them too.")
    ] = False
    media_ports: Annotated[
        list[int] | None,
        typer.Option(
            rich_help_panel=MEDIA,
            metavar="PORT",
            help="A port of URLs; may be repeated. Left out: 80 and 443.",
        ),
    ] = None
    media_timeout_s: Annotated[float, typer.Option(rich_help_panel=MEDIA, help="For one URL.")] = 10.0
    max_media_bytes: Annotated[int, typer.Option(rich_help_panel=MEDIA, help="Of one URL or file.")] = (
        64 * 2**20
    )
    max_media_urls: Annotated[
        int, typer.Option(rich_help_panel=MEDIA, help="Of one call, or one line of a batch.")
    ] = 64
    max_media_fetches: Annotated[int, typer.Option(rich_help_panel=MEDIA, help="At once.")] = 16
    max_media_in_flight_bytes: Annotated[
        int, typer.Option(rich_help_panel=MEDIA, help="Of all that are fetched and not yet prepared.")
    ] = 2**30

    def media_options(self) -> "dict[str, MediaFetcher] | None":
        """Of a prompt whose media may be fetched; None: nothing may. Raises ConfigError."""
        if not self.allow_media_urls:
            return None
        from mmengine.processing.fetch.fetcher import MediaFetcher  # lazy: help needs no ssl

        return {"urls": MediaFetcher(self._limits())}

    def check(self, sources: list[str]) -> None:
        """Raise InvalidRequest for a URL that is not fetched, with the options by which it would be."""
        if not any(name[:8].lower().startswith(URL_HEADS) for name in sources):
            return
        from mmengine.processing.fetch.refusals import FetchRefused  # lazy: help needs no idna
        from mmengine.processing.fetch.urls import parse_url

        limits = self._limits()
        for name in sources:
            try:
                url = parse_url(name)
            except FetchRefused:  # a path, or a URL of which more is said where it is read
                continue
            lacks = {
                f"--allow-media-urls {url.host} (or public)": not limits.allows_host(url.host),
                "--allow-http-media": url.scheme == "http" and not limits.http,
                f"--media-ports {url.port}": url.port not in limits.ports,
            }
            if options := [option for option, is_lacking in lacks.items() if is_lacking]:
                raise InvalidRequest(f"{name[:200]} is a URL that is not fetched; give {' '.join(options)}")

    def _limits(self) -> "FetchLimits":
        """Raises ConfigError."""
        from mmengine.processing.fetch.limits import DEFAULT_PORTS, FetchLimits, hosts_of  # lazy: idna

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
