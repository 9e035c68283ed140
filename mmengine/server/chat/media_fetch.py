"""Creates the fetcher for media URLs and local files, and its metrics. Also refuses URLs that the settings do
not allow.
"""

from collections.abc import Iterator
from pathlib import Path

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Metric

from mmengine.errors import FIELD, ErrorCode, FieldPath
from mmengine.processing.fetch.fetcher import Fetched, MediaFetcher
from mmengine.processing.fetch.limits import FetchLimits, hosts_of
from mmengine.processing.fetch.prompt_fetch import URL_HEADS
from mmengine.serve.requests.operator_log import operator_log
from mmengine.server.http.errors import ApiError
from mmengine.server.settings import ServerSettings

_SECONDS = (0.01, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30)
_ELSEWHERE = ("ftp:", "s3:", "gs:", *URL_HEADS)


def make_media_fetcher(settings: ServerSettings) -> MediaFetcher | None:
    """Return a fetcher, or None if the settings allow no URLs and no files. Raises ConfigError."""
    if not settings.allow_media_urls and not settings.media_root:
        return None
    return MediaFetcher(
        FetchLimits(
            hosts=hosts_of(settings.allow_media_urls) if settings.allow_media_urls else (),
            http=settings.allow_http_media,
            ports=settings.media_ports,
            root=Path(settings.media_root) if settings.media_root else None,
            timeout_s=settings.media_timeout_s,
            max_bytes=settings.max_media_bytes,
            max_urls=settings.max_media_urls,
            max_fetches=settings.max_media_fetches,
            max_bytes_in_flight=settings.max_media_in_flight_bytes,
        )
    )


def check_url(where: FieldPath, url: str, media_fetcher: MediaFetcher | None) -> None:
    """Raise ApiError for a URL whose scheme this server never reads. The fetcher checks hosts and paths."""
    head = url[:16].lower()
    fetches = media_fetcher is not None and media_fetcher.limits.hosts != ()
    if head.startswith(URL_HEADS) and fetches:
        return
    if head.startswith(_ELSEWHERE):
        which = "this server fetches only https: URLs" if fetches else "this server fetches no URLs"
        raise ApiError(
            ErrorCode.URL_NOT_FETCHED,
            f"{FIELD} is a URL, and {which} (--allow-media-urls); send the data as a data: URL",
            where,
        )
    if head.startswith("file:") and media_fetcher is not None and media_fetcher.reads_files:
        return
    if head.startswith("file:") or "://" in head:
        raise ApiError(
            ErrorCode.URL_NOT_ALLOWED,
            f"{FIELD} names a file, which is not allowed here (--media-root); send the file as a data: URL",
            where,
        )


class FetchMetrics:
    """The metrics for a media fetcher. Failed fetches are logged with the host, but without the URL's path
    and query, which may contain credentials.
    """

    def __init__(self, media_fetcher: MediaFetcher | None) -> None:
        self._registry = registry = CollectorRegistry(auto_describe=False)
        self._seconds = Histogram(
            "mmengine_media_fetch_seconds",
            "Seconds per fetch of media by URL or from the media folder, including refused fetches.",
            buckets=_SECONDS,
            registry=registry,
        )
        self._bytes = Counter("mmengine_media_fetch_bytes", "Bytes of fetched media.", registry=registry)
        self._refused = Counter(
            "mmengine_media_fetch_refused",
            "Media that were not fetched, by reason.",
            ["reason"],
            registry=registry,
        )
        running = Gauge("mmengine_media_fetch_running", "Running fetches.", registry=registry)
        held = Gauge(
            "mmengine_media_fetch_held_bytes",
            "Bytes of fetched media that are not prepared yet, plus the bytes reserved for running fetches.",
            registry=registry,
        )
        if media_fetcher is not None:
            running.set_function(lambda: media_fetcher.num_running)
            held.set_function(lambda: media_fetcher.num_bytes)
            media_fetcher.on_fetched = self.saw

    def saw(self, fetched: Fetched) -> None:
        """Count a fetch. Runs on the fetcher's thread."""
        self._seconds.observe(fetched.seconds)
        self._bytes.inc(fetched.num_bytes)
        if fetched.reason:
            self._refused.labels(fetched.reason).inc()
        if fetched.reason not in ("", "given_up"):
            operator_log.info("media not fetched", host=fetched.host, reason=fetched.reason)

    def collect(self) -> Iterator[Metric]:
        yield from self._registry.collect()
