"""Send messages between rank 0 and a following rank over an inherited Unix socket pair.

A message is its kind (one byte), its length (8 bytes, little endian) and its body. When either process ends,
the channel closes, so no process waits for a dead peer.
"""

import socket
import struct
from enum import IntEnum

_HEADER = struct.Struct("<BQ")
MAX_BYTES = 2**33  # larger than a snapshot of the largest state that settings allow


class MessageKind(IntEnum):
    """Message kinds: JOB, START and STEP go to a follower, the others come back.

    STEP: log frames; the follower runs the step that they decide. READY: the weights are loaded, or
    everything that steps need. FAILED: a sentence about a step. ENDS: a sentence, the last message from a
    rank that cannot continue. WORD: a rank's word while steps are captured, and the answer whether all words
    agree.
    """

    JOB = 1
    START = 2
    STEP = 3
    READY = 4
    FAILED = 5
    ENDS = 6
    WORD = 7


class ChannelClosed(Exception):
    """The peer is gone."""


class Channel:
    """An end of the socket pair. `send_timeout_s`: time for the peer to read a message; None: unlimited."""

    def __init__(self, end: socket.socket, send_timeout_s: float | None = None) -> None:
        self._end, self._send_timeout_s = end, send_timeout_s

    def send(self, kind: MessageKind, body: bytes = b"") -> None:
        """Send a message. Raises ChannelClosed, after which nothing more can be sent."""
        try:
            self._end.settimeout(self._send_timeout_s)
            self._end.sendall(_HEADER.pack(kind, len(body)) + body)
            self._end.settimeout(None)
        except OSError as error:
            raise ChannelClosed(str(error)) from None

    def receive(self, timeout_s: float | None = None) -> tuple[MessageKind, bytes] | None:
        """Return the next message, or None if none begins within `timeout_s` (None: wait). Raises
        ChannelClosed.
        """
        self._end.settimeout(timeout_s)
        try:
            first = self._end.recv(1)
        except (TimeoutError, BlockingIOError):
            return None
        except OSError as error:
            raise ChannelClosed(str(error)) from None
        finally:
            self._end.settimeout(None)
        if not first:
            raise ChannelClosed("the peer ended")
        kind, length = _HEADER.unpack(first + self._exactly(_HEADER.size - 1))
        if length > MAX_BYTES:
            raise ChannelClosed(f"the peer announced a message of {length} bytes")
        return MessageKind(kind), self._exactly(length)

    def _exactly(self, length: int) -> bytes:
        data = bytearray(length)
        view = memoryview(data)
        while view:
            try:
                count = self._end.recv_into(view)
            except OSError as error:
                raise ChannelClosed(str(error)) from None
            if not count:
                raise ChannelClosed("the peer ended in the middle of a message")
            view = view[count:]
        return bytes(data)

    def close(self) -> None:
        self._end.close()
