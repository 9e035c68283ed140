"""Selects a replica for a request, and makes one attempt to run the request there."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import NamedTuple, Protocol

from mmengine.errors import InvalidRequest, MMEngineError, QueueFull
from mmengine.fleet.wire import (
    Accepted,
    Heartbeat,
    Outputs,
    Redirect,
    Rejection,
    ReplicaName,
    ReplicaRequest,
    decode_message,
    encode,
)

MAX_AVOIDED = 8  # how many of the most recently failed replicas are avoided
FAILED_CHOICES = 8  # after this many failed choices, the list of avoided replicas is cleared


class ReplicaLost(Exception):
    """The replica that was answering a request has ended."""


class Carrier(Protocol):
    """Transports bytes from an ingress to replicas and back."""

    def call(self, key: str, data: bytes) -> AsyncGenerator[bytes, None]:
        """Send a ReplicaRequest to a replica, and yield the replica's messages.

        `key` selects a replica. If this replica takes no requests, its successor on the hash ring gets the
        request. Closing the generator cancels the request on the replica. Raises ReplicaLost, and QueueFull
        if all replicas are full.
        """

    def is_leaving(self, replica: str) -> bool:
        """Return whether `replica` takes no more requests, so its running requests must move."""


class RoutingLimits(NamedTuple):
    """Limits of routing: times in seconds, and how many replicas may end during a request.

    A replica that is silent for `silence_s` is given up. A request waits at most `patience_s` for a replica
    that accepts it. If `deaths` consecutive replicas end before they return a token for the request, the
    request counts as the cause.
    """

    silence_s: float = 10.0
    patience_s: float = 120.0
    deaths: int = 3


class Reroute(Exception):
    """Raised when a request must continue on another replica.

    `replica`: a replica that may still compute the request, or "". `is_death`: whether the replica has ended
    or seems to have ended.
    """

    def __init__(self, reason: str, replica: str = "", *, is_death: bool = False):
        super().__init__(reason)
        self.replica, self.is_death = replica, is_death


class ReplicaChoice:
    """Selects replicas for a request by its routing key. Avoids replicas that failed the request."""

    def __init__(self, key: str):
        self._key = key
        self.avoided: tuple[str, ...] = ()
        self._num_failed = 0  # how many choices led to a silent or avoided replica

    @property
    def key(self) -> str:
        """The routing key for the next attempt. Each failed choice changes the key, which selects another
        replica.
        """
        return f"{self._key}/{self._num_failed}" if self._num_failed else self._key

    def avoid(self, replica: str) -> None:
        """Make no further attempt at this replica."""
        if replica and replica not in self.avoided:
            self.avoided = (*self.avoided, replica)[-MAX_AVOIDED:]

    def note_silent(self) -> None:
        """Record that the selected replica became silent."""
        self._num_failed += 1

    def note_reached(self, replica: str) -> None:
        """Record that the key selected `replica`. An avoided replica counts as a failed choice. Every
        FAILED_CHOICES failed choices clear `avoided`.
        """
        if replica in self.avoided:
            self._num_failed += 1
            if self._num_failed % FAILED_CHOICES == 0:
                self.avoided = ()


class Receiver(Protocol):
    """The request for which an attempt is made."""

    @property
    def is_accepted(self) -> bool:
        """Whether the log of any replica has recorded the request."""

    def note_alive(self) -> None:
        """Called when a replica has sent a message."""

    async def accept(self, message: Accepted) -> None:
        """Called when a replica's log has recorded the request."""

    def receive(self, message: Outputs) -> None:
        """Called when a replica has sent outputs."""


class Attempt:
    """A single call to a replica."""

    def __init__(
        self,
        carrier: Carrier,
        limits: RoutingLimits,
        choice: ReplicaChoice,
        request: ReplicaRequest,
        receiver: Receiver,
    ):
        self._carrier, self._limits, self._choice = carrier, limits, choice
        self._request, self._receiver = request, receiver
        self._replica = ""  # the replica's name; "" before its first message

    async def run(self) -> None:
        """Forward the replica's messages until the answer ends.

        Raises Reroute, or the error with which the replica rejected the request.
        """
        async with aclosing(self._carrier.call(self._choice.key, encode(self._request))) as messages:
            while True:
                message = await self._next(messages)
                self._receiver.note_alive()
                match message:
                    case ReplicaName(replica=name):
                        self._replica = name
                        self._choice.note_reached(name)
                    case Redirect(reason=reason):
                        raise self._redirected(reason)
                    case Rejection():
                        self._reject(message.error())
                    case Accepted():
                        await self._receiver.accept(message)
                    case Outputs():
                        self._receiver.receive(message)
                        if message.end is not None:
                            return
                    case Heartbeat():
                        pass
                if self._carrier.is_leaving(self._replica):
                    reason = f"replica {self._replica} takes no more requests"
                    raise Reroute(reason, self._replica)

    async def _next(self, messages: AsyncGenerator[bytes, None]) -> object:
        try:
            async with asyncio.timeout(self._limits.silence_s):
                return decode_message(await anext(messages))
        except StopAsyncIteration:
            raise self._failed("the replica's messages ended before the answer was complete") from None
        except ReplicaLost as lost:
            raise self._failed(f"the replica is lost ({lost})") from None
        except QueueFull as full:  # the carrier raises this before any replica has the request
            self._reject(full)
            raise AssertionError("unreachable") from None
        except TimeoutError:
            if self._replica:
                self._choice.note_silent()
            raise self._failed("the replica is silent") from None

    def _failed(self, reason: str) -> Reroute:
        self._choice.avoid(self._replica)
        text = f"replica {self._replica or '(none yet)'}: {reason}"
        return Reroute(text, self._replica, is_death=bool(self._replica))

    def _redirected(self, reason: str) -> Reroute:
        text = f"replica {self._replica}: {reason}"
        if self._replica in self._request.avoid:
            return Reroute(text)
        self._choice.avoid(self._replica)
        return Reroute(text, self._replica)

    def _reject(self, error: MMEngineError) -> None:
        """Raise `error`. If another replica has accepted the request before, raise Reroute instead of
        QueueFull or InvalidRequest.
        """
        if not self._receiver.is_accepted or not isinstance(error, (QueueFull, InvalidRequest)):
            raise error
        self._choice.avoid(self._replica)
        raise Reroute(f"replica {self._replica} refused the request: {error}")
