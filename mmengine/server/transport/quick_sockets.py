"""Accepts connections and reads their first bytes without releasing the GIL.

Python's socket methods release the GIL during each system call, and then wait up to a switch interval to get
the GIL back. While the server's threads are busy, accepting hundreds of connections takes a second. The
system calls here return immediately, so this module keeps the GIL.
"""

import ctypes
import errno
import os
import socket
import sys

PEEK_BYTES = 4096
_IS_LINUX = sys.platform == "linux"
_libc = ctypes.PyDLL(None, use_errno=True) if _IS_LINUX else None


def accept(bound: socket.socket) -> socket.socket:
    """Return the next connection of a non-blocking listening socket. Raises BlockingIOError if no connection
    is waiting, and other OSErrors.
    """
    if _libc is None:
        connection = bound.accept()[0]
        connection.setblocking(False)
        return connection
    flags = socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK
    fd = _libc.accept4(bound.fileno(), None, None, flags)
    if fd < 0:
        raise _last_error()
    return socket.socket(bound.family, bound.type, bound.proto, fileno=fd)


def peek(connection: socket.socket) -> bytes:
    """Return a connection's first bytes without consuming them. Returns b"" if the client has closed the
    connection. Raises BlockingIOError if no bytes have arrived, and other OSErrors.
    """
    if _libc is None:
        return connection.recv(PEEK_BYTES, socket.MSG_PEEK)
    flags = socket.MSG_PEEK | socket.MSG_DONTWAIT
    found = ctypes.create_string_buffer(PEEK_BYTES)
    count = _libc.recv(connection.fileno(), found, PEEK_BYTES, flags)
    if count < 0:
        raise _last_error()
    return ctypes.string_at(found, count)


def _last_error() -> OSError:
    number = ctypes.get_errno() or errno.EIO
    return OSError(number, os.strerror(number))  # Python selects the subclass of OSError for the number.
