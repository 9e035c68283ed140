"""A single attempt to have a replica answer a request, and the replica's selection."""

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

MAX_AVOIDED = 8  # the replicas that failed the request last get no further attempt
FAILED_CHOICES = 8  # after so many choices of avoided replicas, no replica is avoided any more


class ReplicaLost(Exception):
    """The replica that answered has ended."""


class Carrier(Protocol):
    """Carries bytes from an ingress to replicas and back."""

    def call(self, key: str, data: bytes) -> AsyncGenerator[bytes, None]:
        """Yield a replica's messages for a ReplicaRequest.

        `key` selects the replica, or its successor on the ring if the replica takes no requests. Closing the
        generator cancels the request there. Raises ReplicaLost.
        """

    def is_leaving(self, replica: str) -> bool:
        """Whether this replica is known to take no more requests, so that its requests move."""


class RoutingLimits(NamedTuple):
    """Limits for routing, in seconds.

    A replica that is silent for `silence_s` is given up. A request waits `patience_s` for a replica that
    accepts it. If `deaths` replicas in a row end without a token for the request, the request counts as the
    cause.
    """

    silence_s: float = 10.0
    patience_s: float = 120.0
    deaths: int = 3


class Reroute(Exception):
    """The request has to continue on another replica.

    `replica` may still be computing the request ("" if no replica is). `is_death` says whether that replica
    ended or seems to have ended.
    """

    def __init__(self, reason: str, replica: str = "", *, is_death: bool = False):
        super().__init__(reason)
        self.replica, self.is_death = replica, is_death


class ReplicaChoice:
    """Selects replicas for a request by its routing key, and avoids replicas that failed before."""

    def __init__(self, key: str):
        self._key = key
        self.avoided: tuple[str, ...] = ()
        self._num_failed = 0  # choices that led to a silent or an avoided replica

    @property
    def key(self) -> str:
        """The routing key for the next attempt: a different position on the ring after each failed choice."""
        return f"{self._key}/{self._num_failed}" if self._num_failed else self._key

    def avoid(self, replica: str) -> None:
        """Send no further attempt to this replica."""
        if replica and replica not in self.avoided:
            self.avoided = (*self.avoided, replica)[-MAX_AVOIDED:]

    def note_silent(self) -> None:
        """Record that the replica to which the key leads was silent."""
        self._num_failed += 1

    def note_reached(self, replica: str) -> None:
        """Record that the key led to `replica`. After FAILED_CHOICES failures none is avoided any more."""
        if replica in self.avoided:
            self._num_failed += 1
            if self._num_failed % FAILED_CHOICES == 0:
                self.avoided = ()


class Receiver(Protocol):
    """The request that an attempt is made for."""

    @property
    def is_accepted(self) -> bool:
        """Whether any replica's log has had the request."""

    def note_alive(self) -> None:
        """Called when a replica has sent a message."""

    async def accept(self, message: Accepted) -> None:
        """Called when a replica's log has the request."""

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
        self._replica = ""  # its name, when it has answered

    async def run(self) -> None:
        """Pass on the replica's messages until the answer ends.

        Raises Reroute, and the replica's rejection.
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
            raise self._failed("its messages ended before the answer did") from None
        except ReplicaLost as lost:
            raise self._failed(f"it is lost ({lost})") from None
        except QueueFull as full:  # raised by the carrier before any replica has the request
            self._reject(full)
            raise AssertionError("unreachable") from None
        except TimeoutError:
            if self._replica:
                self._choice.note_silent()
            raise self._failed("it is silent") from None

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
        """Raise `error`, or Reroute if a replica accepted the request before and only this replica refuses
        it.
        """
        if not self._receiver.is_accepted or not isinstance(error, (QueueFull, InvalidRequest)):
            raise error
        self._choice.avoid(self._replica)
        raise Reroute(f"replica {self._replica} refused it: {error}")
