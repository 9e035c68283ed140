"""Messages between rank 0 and another rank (a follower), over an inherited pair of Unix sockets.

A message has its kind (one byte), its length (8 bytes, little endian) and its body. If a process ends, the
channel closes and the other process stops waiting.
"""

import socket
import struct
from enum import IntEnum

_HEADER = struct.Struct("<BQ")
MAX_BYTES = 2**33  # maximum body length; above any snapshot's size


class MessageKind(IntEnum):
    """Rank 0 sends JOB, START and STEP. A follower sends READY, FAILED and ENDS. Both send WORD.

    JOB: the model to load, and how to connect (job.py). START: a snapshot with the engine's initial state.
    STEP: log frames with the decisions for a step, which the follower computes. READY: sent when the weights
    are loaded, and again when the follower can compute steps. FAILED: why a step failed on the
    follower. ENDS: the follower's last message, with the reason why the follower cannot continue. WORD:
    describes a follower's progress while CUDA graphs are captured. Rank 0 replies whether all ranks sent the
    same word (graphs.py).
    """

    JOB = 1
    START = 2
    STEP = 3
    READY = 4
    FAILED = 5
    ENDS = 6
    WORD = 7


class ChannelClosed(Exception):
    """The process at the other end of the channel is gone."""


class Channel:
    """This process's end in the socket pair. `send_timeout_s`: maximum time for the peer to read a message;
    None: no limit.
    """

    def __init__(self, end: socket.socket, send_timeout_s: float | None = None) -> None:
        self._end, self._send_timeout_s = end, send_timeout_s

    def send(self, kind: MessageKind, body: bytes = b"") -> None:
        """Send a message. Raises ChannelClosed if the peer is gone; the channel can then send no more
        messages.
        """
        try:
            self._end.settimeout(self._send_timeout_s)
            self._end.sendall(_HEADER.pack(kind, len(body)) + body)
            self._end.settimeout(None)
        except OSError as error:
            raise ChannelClosed(str(error)) from None

    def receive(self, timeout_s: float | None = None) -> tuple[MessageKind, bytes] | None:
        """Return the next message, or None if no message begins within `timeout_s` (None: no limit).

        Raises ChannelClosed if the peer is gone.
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
