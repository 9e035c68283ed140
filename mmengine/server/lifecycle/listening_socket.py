"""Creates the server's listening socket, or adopts a socket from a supervisor or systemd."""

import os
import socket
from collections.abc import MutableMapping

from mmengine.errors import ConfigError
from mmengine.server.lifecycle.health_port import MAX_PROBES
from mmengine.server.settings import ServerSettings

FIRST_FD = 3  # The first descriptor that systemd passes.
_FAMILIES = (socket.AF_INET, socket.AF_INET6)


def listen(settings: ServerSettings) -> socket.socket:
    """Return the socket from systemd, or else a new socket at the settings' address. Raises ConfigError."""
    return find_inherited_socket(os.environ) or bind(settings.host, settings.port, settings.max_connections)


def bind(host: str, port: int, backlog: int, options: str = "--host or --port") -> socket.socket:
    """Return a listening socket. `backlog`: maximum number of unaccepted connections. `options`: the
    command-line options that an error message names. Raises ConfigError if the address cannot be bound.
    """
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        bound = socket.create_server((host, port), family=family, backlog=backlog)
    except OSError as error:
        raise ConfigError(
            f"cannot listen on {host}:{port} ({_why(error)}); choose another {options}"
        ) from None
    bound.setblocking(False)
    return bound


def listen_for_health(settings: ServerSettings) -> socket.socket | None:
    """Return the health port's listening socket, or None if the settings have no health port. Raises
    ConfigError.
    """
    if settings.health_port is None:
        return None
    host = settings.health_host or settings.host
    return bind(host, settings.health_port, MAX_PROBES, "--health-host or --health-port")


def find_inherited_socket(environment: MutableMapping[str, str]) -> socket.socket | None:
    """Return the socket that systemd passed to this process, or None. Follows sd_listen_fds(3).

    systemd passes LISTEN_FDS descriptors, starting at 3, to the process LISTEN_PID. These variables are
    removed from `environment`, because they must not reach child processes. Raises ConfigError for several
    sockets, or for a socket that is not a listening TCP socket.
    """
    meant_for, count = (environment.pop(name, "") for name in ("LISTEN_PID", "LISTEN_FDS"))
    environment.pop("LISTEN_FDNAMES", None)
    if meant_for != str(os.getpid()) or not count.isdecimal() or count == "0":
        return None
    if count != "1":
        raise ConfigError(
            f"systemd passed {count} sockets; the server uses one: list only one socket in the unit"
        )
    return adopt_socket(FIRST_FD)


def adopt_socket(fd: int) -> socket.socket:
    """Return the listening socket with this inherited descriptor. Raises ConfigError if the descriptor is not
    a listening TCP socket.
    """
    try:
        found = socket.socket(fileno=fd)
        listens = found.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
    except OSError as error:
        raise ConfigError(f"inherited descriptor {fd} is not a socket ({_why(error)})") from None
    if found.family not in _FAMILIES or found.type != socket.SOCK_STREAM or not listens:
        found.detach()
        raise ConfigError(f"inherited descriptor {fd} is not a listening TCP socket")
    found.set_inheritable(False)
    found.setblocking(False)
    return found


def address_of(bound: socket.socket) -> str:
    """Return host:port in the format of a URL."""
    host, port = bound.getsockname()[:2]
    return f"{f'[{host}]' if ':' in host else host}:{port}"


def _why(error: OSError) -> str:
    """Return the system's error message without the address that Python appends."""
    if isinstance(error, socket.gaierror) or error.errno is None:
        return (error.strerror or str(error)).partition(" (while")[0]
    return os.strerror(error.errno)
