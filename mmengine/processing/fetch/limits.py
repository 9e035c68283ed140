"""The limits on fetched media: which URLs and files may be fetched, and how many bytes."""

from dataclasses import dataclass
from pathlib import Path

from mmengine.errors import ConfigError, shown
from mmengine.processing.fetch.refusals import FetchRefused, refused
from mmengine.processing.fetch.urls import host_name

DEFAULT_PORTS = (80, 443)
PUBLIC = "public"  # The name that stands for all hosts.


@dataclass(frozen=True, slots=True, kw_only=True)
class FetchLimits:
    """Limits on fetched media. Times are in seconds, sizes in bytes.

    `hosts`: host names; a leading `*.` stands for all names below a domain. None: every host. (): no URLs are
    fetched. `root`: the folder for `file:` URLs and paths; None: no files are read. `timeout_s`: limit per
    URL, including redirects. `max_bytes`: limit per item. `max_bytes_in_flight`: total limit for items that
    are fetched and not yet prepared. A prompt may use half this limit, or `max_bytes` if that is more. Raises
    ConfigError.
    """

    hosts: tuple[str, ...] | None = None
    http: bool = False  # Whether to fetch http: URLs too, without TLS.
    ports: tuple[int, ...] = DEFAULT_PORTS
    root: Path | None = None
    timeout_s: float = 10.0
    max_bytes: int = 64 * 2**20
    max_redirects: int = 3
    max_urls: int = 64  # Maximum number of URLs per prompt.
    max_fetches: int = 16  # Maximum number of concurrent fetches.
    max_fetches_a_host: int = 6
    max_bytes_in_flight: int = 2**30

    def __post_init__(self) -> None:
        for name in ("timeout_s", "max_bytes", "max_urls", "max_fetches", "max_bytes_in_flight"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"{name} of media must be above 0, not {shown(getattr(self, name))}")
        for port in self.ports:
            if not 0 < port < 2**16:
                raise ConfigError(f"ports of media must be from 1 to 65535, not {shown(port)}")

    @property
    def max_fetches_a_prompt(self) -> int:
        """Return the maximum number of concurrent fetches for a prompt: half of `max_fetches`, so that other
        prompts can fetch too.
        """
        return max(1, self.max_fetches // 2)

    @property
    def max_bytes_a_prompt(self) -> int:
        return max(self.max_bytes, self.max_bytes_in_flight // 2)

    def allows_host(self, name: str) -> bool:
        if self.hosts is None:
            return True
        return any(name.endswith(host[1:]) if host.startswith("*.") else name == host for host in self.hosts)


def hosts_of(given: object) -> tuple[str, ...] | None:
    """Convert the user's setting to `FetchLimits.hosts`. True or "public" means every host; False or None
    means no host. Raises ConfigError.
    """
    if given is True or given == PUBLIC or given in ([PUBLIC], (PUBLIC,)):
        return None
    if given is None or given is False:
        return ()
    names = [given] if isinstance(given, str) else given
    if not isinstance(names, (list, tuple, set, frozenset)) or not all(isinstance(n, str) for n in names):
        raise ConfigError(f"hosts of media URLs must be {PUBLIC} or names, not {shown(given)}")
    return tuple(map(_pattern, sorted(names)))


def _pattern(name: str) -> str:
    wild = "*." if name.startswith("*.") else ""
    try:
        if name == PUBLIC:
            raise refused("host")
        return wild + host_name(name.removeprefix("*."))
    except FetchRefused:
        raise ConfigError(
            f"{shown(name)} is not a host name; give names like images.example.org or *.example.org, or "
            f"{PUBLIC} alone"
        ) from None
