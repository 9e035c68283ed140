"""The socket that a server answers on: bound here, handed down by a supervisor, or by systemd. Who holds it
needs no engine."""

import os
import socket
from collections.abc import MutableMapping

from mmengine.errors import ConfigError
from mmengine.server.settings import ServerSettings

FIRST_FD = 3  # of those that systemd hands down
_FAMILIES = (socket.AF_INET, socket.AF_INET6)


def listen(settings: ServerSettings) -> socket.socket:
    """The socket that systemd handed down, else one that is bound to the address. Raises ConfigError where
    neither can be had."""
    return given(os.environ) or bind(settings.host, settings.port, settings.max_connections)


def bind(host: str, port: int, backlog: int, options: str = "--host or --port") -> socket.socket:
    """`backlog`: connections that wait to be taken. `options`: those that say where. Raises ConfigError where
    the address cannot be had."""
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        bound = socket.create_server((host, port), family=family, backlog=backlog)
    except OSError as error:
        raise ConfigError(
            f"cannot listen on {host}:{port} ({_why(error)}); choose another {options}"
        ) from None
    bound.setblocking(False)
    return bound


def given(environment: MutableMapping[str, str]) -> socket.socket | None:
    """The socket of a unit of systemd, as sd_listen_fds(3) has it: LISTEN_FDS descriptors from 3 on, meant
    for the process LISTEN_PID. The variables are taken out, so that no process below this one reads them.
    Raises ConfigError for anything but one socket of TCP that listens."""
    meant_for, count = (environment.pop(name, "") for name in ("LISTEN_PID", "LISTEN_FDS"))
    environment.pop("LISTEN_FDNAMES", None)
    if meant_for != str(os.getpid()) or not count.isdecimal() or count == "0":
        return None
    if count != "1":
        raise ConfigError(f"systemd handed {count} sockets down, and one is served; name one in the unit")
    return taken(FIRST_FD)


def taken(fd: int) -> socket.socket:
    """The listening socket behind a descriptor that this process has been given. Raises ConfigError."""
    try:
        found = socket.socket(fileno=fd)
        listens = found.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
    except OSError as error:
        raise ConfigError(f"descriptor {fd}, which was handed down, is no socket ({_why(error)})") from None
    if found.family not in _FAMILIES or found.type != socket.SOCK_STREAM or not listens:
        found.detach()
        raise ConfigError(f"descriptor {fd}, which was handed down, is no socket of TCP that listens")
    found.set_inheritable(False)
    found.setblocking(False)
    return found


def address_of(bound: socket.socket) -> str:
    """As host:port, as a URL has it."""
    host, port = bound.getsockname()[:2]
    return f"{f'[{host}]' if ':' in host else host}:{port}"


def _why(error: OSError) -> str:
    """Of an error with a socket: the system's own words, which Python puts the address behind."""
    if isinstance(error, socket.gaierror) or error.errno is None:
        return (error.strerror or str(error)).partition(" (while")[0]
    return os.strerror(error.errno)
