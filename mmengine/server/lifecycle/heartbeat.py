"""Heartbeats from the engine's process to the supervisor, every BEAT_S seconds and after tokens were
delivered.

The engine's event loop sends the heartbeats over a socket pair. Each heartbeat contains the state that
/health/ready reports. If the heartbeats stop, the event loop is stuck, and clients get no responses either.
"""

import os
import socket
from contextlib import suppress
from typing import NamedTuple

import msgspec

BEAT_S = 0.25
LATE_S = 5.0  # Seconds without a heartbeat after which the engine counts as not ready.
STUCK_S = (
    # Seconds without a heartbeat after which the engine counts as not alive. Even a burst of calls delays
    # heartbeats for less time.
    30.0
)
MAX_BEAT_BYTES = 64 * 2**10  # Maximum size of a heartbeat.
MAX_REASONS = 16  # Maximum number of reasons in a heartbeat.
MAX_REASON_CHARS = 500  # Longer reasons are truncated.


class Beat(msgspec.Struct, frozen=True, array_like=True):
    """A heartbeat.

    `is_built`: whether the weights are loaded and recovered requests may run. `is_regular`: whether
    heartbeats come at a fixed interval from now on, so that a gap is a fault. `is_serving`: whether clients
    get responses. `reasons`: why the server is not ready. `num_tokens`: output tokens since the process's
    start. `is_frozen`: whether a stuck engine step requires a process restart.
    """

    is_built: bool = False
    is_regular: bool = False
    is_serving: bool = False
    reasons: tuple[str, ...] = ()
    retry_after_s: int = 1
    num_tokens: int = 0
    is_frozen: bool = False


class HeartbeatSender:
    """The engine's end of the socket pair. All methods return without blocking."""

    def __init__(self, fd: int):
        self._socket = socket.socket(fileno=fd)
        self._socket.set_inheritable(False)
        self._socket.setblocking(False)
        self._last = Beat()

    def report_built(self) -> None:
        """Report that the weights are loaded."""
        self.send(Beat(is_built=True))

    def report_end(self, reason: str) -> None:
        """Report that the process ends, and why."""
        self.send(msgspec.structs.replace(self._last, reasons=(reason,)))

    def send(self, beat: Beat) -> None:
        """Send a heartbeat, or drop the heartbeat if the socket's buffer is full.

        If the supervisor has ended, this process ends too and unlocks the log for a new server. On Linux, the
        kernel also kills this process at the supervisor's end (PR_SET_PDEATHSIG).
        """
        self._last = beat
        reasons = tuple(reason[:MAX_REASON_CHARS] for reason in beat.reasons[:MAX_REASONS])
        data = msgspec.json.encode(msgspec.structs.replace(beat, reasons=reasons))
        try:
            self._socket.send(data)
        except ConnectionError:
            os._exit(1)
        except OSError:
            return  # The socket's buffer is full.


class HeartbeatReceiver(NamedTuple):
    """The socket pair. The engine's process inherits the sending end."""

    receiving_end: socket.socket
    sending_end: socket.socket

    @classmethod
    def pair(cls) -> "HeartbeatReceiver":
        receiving_end, sending_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
        receiving_end.setblocking(False)
        return cls(receiving_end, sending_end)

    def newest(self) -> Beat | None:
        """Return the newest heartbeat since the last call, or None."""
        found = None
        with suppress(OSError):
            while True:
                data = self.receiving_end.recv(MAX_BEAT_BYTES)
                with suppress(msgspec.MsgspecError):
                    found = msgspec.json.decode(data, type=Beat)
        return found

    def close(self) -> None:
        self.receiving_end.close()
        self.sending_end.close()
