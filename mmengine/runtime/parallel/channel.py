"""Messages between the rank that decides and one that follows: a Unix socket pair, inherited.

A message is its kind (one byte), its length (8 bytes, little endian) and its bytes. The end of either
process closes the channel, so nobody waits for one that is gone.
"""

import socket
import struct
from enum import IntEnum

_HEADER = struct.Struct("<BQ")
MAX_BYTES = 2**33  # a snapshot of the largest state that settings allow is below it


class Kind(IntEnum):
    """JOB, START and STEP go to a follower, the others come back. STEP: frames of the log, and the step that
    they decide is to be run. READY: the weights are there, or all that steps need. FAILED: a sentence
    on a step. ENDS: a sentence, the last one of a rank that cannot go on. WORD: what a rank says while steps
    are captured, and back whether all say the same."""

    JOB = 1
    START = 2
    STEP = 3
    READY = 4
    FAILED = 5
    ENDS = 6
    WORD = 7


class Closed(Exception):
    """The other side is gone."""


class Channel:
    """`send_timeout_s`: how long the other side may take to read a message; None: for ever."""

    def __init__(self, end: socket.socket, send_timeout_s: float | None = None) -> None:
        self._end, self._send_timeout_s = end, send_timeout_s

    def send(self, kind: Kind, body: bytes = b"") -> None:
        """Raises Closed, after which nothing more can be sent."""
        try:
            self._end.settimeout(self._send_timeout_s)
            self._end.sendall(_HEADER.pack(kind, len(body)) + body)
            self._end.settimeout(None)
        except OSError as error:
            raise Closed(str(error)) from None

    def receive(self, timeout_s: float | None = None) -> tuple[Kind, bytes] | None:
        """The next message; None when none begins within `timeout_s` (None: wait). Raises Closed."""
        self._end.settimeout(timeout_s)
        try:
            first = self._end.recv(1)
        except (TimeoutError, BlockingIOError):
            return None
        except OSError as error:
            raise Closed(str(error)) from None
        finally:
            self._end.settimeout(None)
        if not first:
            raise Closed("it ended")
        kind, length = _HEADER.unpack(first + self._exactly(_HEADER.size - 1))
        if length > MAX_BYTES:
            raise Closed(f"a message of {length} bytes")
        return Kind(kind), self._exactly(length)

    def _exactly(self, length: int) -> bytes:
        data = bytearray(length)
        view = memoryview(data)
        while view:
            try:
                count = self._end.recv_into(view)
            except OSError as error:
                raise Closed(str(error)) from None
            if not count:
                raise Closed("it ended in the middle of a message")
            view = view[count:]
        return bytes(data)

    def close(self) -> None:
        self._end.close()
