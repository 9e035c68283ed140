"""What may be fetched, and how much of it."""

from dataclasses import dataclass
from pathlib import Path

from mmengine.errors import ConfigError, shown
from mmengine.processing.fetch.refusals import FetchRefused, refused
from mmengine.processing.fetch.urls import host_name

DEFAULT_PORTS = (80, 443)
PUBLIC = "public"  # in place of hosts: every one


@dataclass(frozen=True, slots=True, kw_only=True)
class FetchLimits:
    """Times are in seconds, sizes in bytes.

    `hosts`: names, and with `*.` before them all names below; None: every host. () fetches no URLs. `root`:
    the folder that `file:` URLs and paths are read below; None: none are. `timeout_s`: of one URL, redirects
    included. `max_bytes`: of one of them; `max_bytes_in_flight`: of all that are fetched and not yet
    prepared, of which one prompt may have half. Raises ConfigError."""

    hosts: tuple[str, ...] | None = None
    http: bool = False  # without TLS too
    ports: tuple[int, ...] = DEFAULT_PORTS
    root: Path | None = None
    timeout_s: float = 10.0
    max_bytes: int = 64 * 2**20
    max_redirects: int = 3
    max_urls: int = 64  # of one prompt
    max_fetches: int = 16  # at once
    max_fetches_a_host: int = 6
    max_bytes_in_flight: int = 2**30

    def __post_init__(self) -> None:
        for name in ("timeout_s", "max_bytes", "max_urls", "max_fetches", "max_bytes_in_flight"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"{name} of media must be above 0, not {shown(getattr(self, name))}")
        for port in self.ports:
            if not 0 < port < 2**16:
                raise ConfigError(f"ports of media lie in 1 to 65535, not {shown(port)}")

    @property
    def max_fetches_a_prompt(self) -> int:
        """At once: one that brings many slow ones leaves room for others."""
        return max(1, self.max_fetches // 2)

    @property
    def max_bytes_a_prompt(self) -> int:
        return max(self.max_bytes, self.max_bytes_in_flight // 2)

    def allows_host(self, name: str) -> bool:
        if self.hosts is None:
            return True
        return any(name.endswith(host[1:]) if host.startswith("*.") else name == host for host in self.hosts)


def hosts_of(given: object) -> tuple[str, ...] | None:
    """`FetchLimits.hosts` from how users write them: True or "public" is every host, False or None is none.
    Raises ConfigError."""
    if given is True or given == PUBLIC or given in ([PUBLIC], (PUBLIC,)):
        return None
    if given is None or given is False:
        return ()
    names = [given] if isinstance(given, str) else given
    if not isinstance(names, (list, tuple, set, frozenset)) or not all(isinstance(n, str) for n in names):
        raise ConfigError(f"hosts of media URLs are {PUBLIC}, or names, not {shown(given)}")
    return tuple(map(_pattern, sorted(names)))


def _pattern(name: str) -> str:
    wild = "*." if name.startswith("*.") else ""
    try:
        if name == PUBLIC:
            raise refused("host")
        return wild + host_name(name.removeprefix("*."))
    except FetchRefused:
        raise ConfigError(
            f"{shown(name)} is no name of a host; give names as images.example.org or *.example.org, or "
            f"{PUBLIC} alone"
        ) from None
