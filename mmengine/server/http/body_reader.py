"""Bodies of requests, counted while they are read."""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from starlette.types import Receive, Scope

from mmengine.errors import ErrorCode
from mmengine.server.http.drain_rate import DrainRate
from mmengine.server.http.errors import ApiError, ClientLeft

WHOLE = "mmengine.whole"  # among a scope's extensions when all of the body has come


class BodyBudget:
    """What all bodies that are read or prepared may take together."""

    def __init__(self, max_body_bytes: int, max_bytes: int, timeout_s: float, rate: DrainRate):
        self._max_body, self.max_bytes, self._timeout_s = max_body_bytes, max_bytes, timeout_s
        self._rate = rate
        self.num_bytes = 0

    def reserve(
        self, added: Callable[[int, int], None] = lambda reservation, count: None
    ) -> "BodyReservation":
        """Room for one body. `added`: told of the bytes that it has and of those that come, or go, as less
        than none; it may refuse them with an ApiError."""
        return BodyReservation(self, added)

    def add(self, reservation: "BodyReservation", count: int) -> None:
        """Raises ApiError where that is more than fits."""
        if reservation.num_bytes - reservation.num_before + count > self._max_body:
            raise ApiError(
                ErrorCode.REQUEST_TOO_LARGE,
                f"the body has more than {self._max_body} bytes (max_body_bytes); send smaller images, or "
                "fewer of them",
                headers={"connection": "close"},
            )
        self._take(reservation, count)

    def add_before(self, reservation: "BodyReservation", count: int) -> None:
        """Of what a body goes on with, and does not bring. Raises ApiError where that is more than fits."""
        self._take(reservation, count)
        reservation.num_before += count

    def _take(self, reservation: "BodyReservation", count: int) -> None:
        if self.num_bytes + count > self.max_bytes:
            raise ApiError(
                ErrorCode.BODIES_FULL,
                f"bodies of more than {self.max_bytes} bytes are on their way (max_bodies_bytes); try "
                "again later",
                headers={"retry-after": str(self._rate.retry_after_s()), "connection": "close"},
            )
        reservation.added(reservation.num_bytes, count)
        reservation.num_bytes += count
        self.num_bytes += count

    async def read(self, scope: Scope, receive: Receive, reservation: "BodyReservation") -> list[bytes]:
        """A body's pieces, `held.num_bytes` together. Raises ApiError, ClientLeft."""
        headers = dict(scope["headers"])
        length = headers.get(b"content-length", b"")
        if length.isdigit() and int(length) > self._max_body:
            self.add(reservation, int(length))
        if headers.get(b"content-encoding", b"identity") != b"identity":
            raise ApiError(
                ErrorCode.BODY_COMPRESSED, "the body is compressed, which is not taken; send it as it is"
            )
        if WHOLE in scope["extensions"]:  # as most are, and a timeout costs more than reading it
            return await self._chunks(receive, reservation)
        try:
            async with asyncio.timeout(self._timeout_s):
                return await self._chunks(receive, reservation)
        except TimeoutError:
            raise ApiError(
                ErrorCode.BODY_TIMEOUT,
                f"the body did not come within {self._timeout_s:g} seconds (body_timeout_s)",
                headers={"connection": "close"},
            ) from None

    async def _chunks(self, receive: Receive, reservation: "BodyReservation") -> list[bytes]:
        chunks: list[bytes] = []
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                raise ClientLeft
            chunk = message.get("body", b"")
            self.add(reservation, len(chunk))
            chunks.append(chunk)
            if not message.get("more_body", False):
                return chunks


class BodyReservation:
    """What one body takes, until nobody needs it: to its release, or the end of its `with`. `num_before`: of
    its bytes those that it goes on with."""

    def __init__(self, bodies: BodyBudget, added: Callable[[int, int], None]):
        self.num_bytes = self.num_before = 0
        self._bodies, self.added = bodies, added

    def __enter__(self) -> "BodyReservation":
        return self

    def __exit__(self, *exc: object) -> None:
        self.release()

    def release(self) -> None:
        """What was read has become a request, which the engine counts."""
        count, self.num_bytes, self.num_before = self.num_bytes, 0, 0
        self._bodies.num_bytes -= count
        self.added(count, -count)


SMALL_BODY = 2**13  # bytes; what is larger may take a millisecond to read, and is read on a thread
LARGE_BODY = 2**20  # what is larger waits behind others of its kind alone
_T = TypeVar("_T")


class ParserThreads:
    """One thread for each of two sizes: several would wait for one another, and the event loop for all of
    them."""

    def __init__(self) -> None:
        self._one = ThreadPoolExecutor(1, "mmengine-parse")
        self._large = ThreadPoolExecutor(1, "mmengine-parse-large")

    async def run(self, num_bytes: int, work: Callable[[], _T]) -> _T:
        """What takes as long as a body of so many bytes is large. Raises what `work` does."""
        if num_bytes <= SMALL_BODY:
            return work()
        parser = self._large if num_bytes > LARGE_BODY else self._one
        return await asyncio.get_running_loop().run_in_executor(parser, work)
