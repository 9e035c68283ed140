"""Parses URLs, and refuses ambiguous URLs that another parser could read differently."""

import ipaddress
import re
from dataclasses import dataclass
from urllib.parse import quote, urljoin, urlsplit

import idna

from mmengine.processing.fetch.addresses import IPAddress
from mmengine.processing.fetch.refusals import refused

MAX_URL_CHARS = 8192  # Maximum length of a URL, and of a redirect's target.
MAX_HOST_CHARS = 253  # The limit in DNS.
DEFAULT_PORTS = {"http": 80, "https": 443}
# Some parsers drop these characters, and others split the URL at them.
_NEVER = re.compile(r"[\x00-\x20\x7f-\xa0\\]|[\ud800-\udfff]")
_LABEL = re.compile(r"[a-z0-9_](?:[a-z0-9_-]{0,61}[a-z0-9_])?")
_NUMBER = re.compile(r"[0-9]+|0x[0-9a-f]*")
_KEPT = "!#$%&'()*+,/:;=?@[]~"  # Characters that stay unescaped in a path and a query.


@dataclass(frozen=True, slots=True)
class Url:
    """A checked URL. `host`: lower-case ASCII, without a final dot. `literal`: the host's IP address if the
    URL contains an address, else None. `target`: path and query for the request line.
    """

    scheme: str
    host: str
    port: int
    target: str
    literal: IPAddress | None

    @property
    def authority(self) -> str:
        """Return the value of the Host header."""
        name = f"[{self.host}]" if ":" in self.host else self.host
        return name if self.port == DEFAULT_PORTS[self.scheme] else f"{name}:{self.port}"

    def joined(self, location: str) -> str:
        """Return the target of a redirect as a full URL. `location`: the Location header."""
        if len(location) > MAX_URL_CHARS:
            raise refused("url")
        try:
            return urljoin(f"{self.scheme}://{self.authority}{self.target}", location)
        except ValueError:
            raise refused("url") from None


def parse_url(text: str) -> Url:
    """Parse a URL. Raises FetchRefused."""
    if len(text) > MAX_URL_CHARS or _NEVER.search(text):
        raise refused("url")
    try:
        parts = urlsplit(text)
        port = parts.port
    except ValueError:
        raise refused("url") from None
    if parts.scheme not in DEFAULT_PORTS:
        raise refused("scheme")
    if "@" in parts.netloc:
        raise refused("userinfo")
    host, literal = _host(parts.netloc)
    target = quote(parts.path or "/", safe=_KEPT) + (
        f"?{quote(parts.query, safe=_KEPT)}" if parts.query else ""
    )
    return Url(parts.scheme, host, DEFAULT_PORTS[parts.scheme] if port is None else port, target, literal)


def _host(netloc: str) -> tuple[str, IPAddress | None]:
    if netloc.startswith("["):
        text, bracket, rest = netloc[1:].partition("]")
        if not bracket or "%" in text or (rest and not rest.startswith(":")):
            raise refused("url")
        try:
            address = ipaddress.IPv6Address(text)
        except ValueError:
            raise refused("url") from None
        return str(address), address
    name = host_name(netloc.partition(":")[0])
    if not _NUMBER.fullmatch(name.rpartition(".")[2]):
        return name, None
    try:  # 0x7f.1, 017700000001 and 2130706433 look like addresses, and parsers disagree about them.
        return name, ipaddress.IPv4Address(name)
    except ValueError:
        raise refused("url") from None


def host_name(text: str) -> str:
    """Convert a host name to its form in DNS: lower-case ASCII, no final dot. Raises FetchRefused."""
    name = text.removesuffix(".").lower()
    if len(name) > MAX_HOST_CHARS:
        raise refused("url")
    if not name.isascii():
        try:
            name = idna.encode(name, uts46=True, transitional=False).decode()
        except (idna.IDNAError, UnicodeError):
            raise refused("url") from None
    labels = name.split(".")
    if len(name) > MAX_HOST_CHARS or not all(map(_LABEL.fullmatch, labels)):
        raise refused("url")
    return name
