"""Options of `mmengine run` and `mmengine serve` that open the door to media by URL."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:  # heavy: loaded when a command runs
    from mmengine.processing.fetch.door import MediaDoor

MEDIA = "Media by URL"


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

    def media_options(self) -> "dict[str, MediaDoor] | None":
        """Of a prompt whose media may be fetched; None: nothing may. Raises ConfigError."""
        if not self.allow_media_urls:
            return None
        from mmengine.processing.fetch.door import MediaDoor  # lazy: help needs no ssl
        from mmengine.processing.fetch.limits import DEFAULT_PORTS, FetchLimits, hosts_of

        limits = FetchLimits(
            hosts=hosts_of(self.allow_media_urls),
            http=self.allow_http_media,
            ports=tuple(self.media_ports or DEFAULT_PORTS),
            timeout_s=self.media_timeout_s,
            max_bytes=self.max_media_bytes,
            max_urls=self.max_media_urls,
            max_fetches=self.max_media_fetches,
            max_bytes_in_flight=self.max_media_in_flight_bytes,
        )
        return {"urls": MediaDoor(limits)}
