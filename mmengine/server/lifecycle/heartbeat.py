"""What an engine's process tells its supervisor, four times a second and with new tokens, over a
pair of sockets.

It is said by the event loop, and it holds what /health/ready would answer. So silence means that nobody would
be answered, and no call over the real socket is needed, which would want a key or a certificate and stand in
line behind clients.
"""

import os
import socket
from contextlib import suppress
from typing import NamedTuple

import msgspec

BEAT_S = 0.25
MAX_BEAT_BYTES = 64 * 2**10  # that a supervisor reads at once
MAX_REASONS = 16  # that a supervisor hears of
MAX_REASON_CHARS = 500  # of a reason that a supervisor hears


class Beat(msgspec.Struct, frozen=True, array_like=True):
    """`is_built`: weights are loaded, and steps of what was left in the log may run. `is_regular`: others
    follow, so silence means something. `is_serving`: clients are answered. `reasons`: why none should be
    sent here. `num_tokens`: that callers were given since the process began."""

    is_built: bool = False
    is_regular: bool = False
    is_serving: bool = False
    reasons: tuple[str, ...] = ()
    retry_after_s: int = 1
    num_tokens: int = 0


class Beats:
    """The engine's end. Nothing that it does waits."""

    def __init__(self, fd: int):
        self._socket = socket.socket(fileno=fd)
        self._socket.set_inheritable(False)
        self._socket.setblocking(False)
        self._last = Beat()

    def tell_built(self) -> None:
        """Weights are there, and nothing else yet."""
        self.tell(Beat(is_built=True))

    def tell_end(self, reason: str) -> None:
        """The process ends, because of that."""
        self.tell(msgspec.structs.replace(self._last, reasons=(reason,)))

    def tell(self, beat: Beat) -> None:
        """A supervisor that does not read misses it. One that is gone ends this process, as the kernel does
        where it can, so that the log is free for whoever comes next."""
        self._last = beat
        reasons = tuple(reason[:MAX_REASON_CHARS] for reason in beat.reasons[:MAX_REASONS])
        data = msgspec.json.encode(msgspec.structs.replace(beat, reasons=reasons))
        try:
            self._socket.send(data)
        except ConnectionError:
            os._exit(1)
        except OSError:
            return  # full


class Heard(NamedTuple):
    """The supervisor's end, and the descriptor that is handed down."""

    ear: socket.socket
    mouth: socket.socket

    @classmethod
    def pair(cls) -> "Heard":
        ear, mouth = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
        ear.setblocking(False)
        return cls(ear, mouth)

    def newest(self) -> Beat | None:
        """Of those that came since it was asked last; None: none did."""
        found = None
        with suppress(OSError):
            while True:
                data = self.ear.recv(MAX_BEAT_BYTES)
                with suppress(msgspec.MsgspecError):
                    found = msgspec.json.decode(data, type=Beat)
        return found

    def close(self) -> None:
        self.ear.close()
        self.mouth.close()
