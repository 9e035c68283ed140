"""Reads request bodies within a byte budget, and parses large bodies on threads."""

import asyncio
import codecs
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from starlette.types import Receive, Scope

from mmengine.errors import ErrorCode
from mmengine.server.http.drain_rate import DrainRate
from mmengine.server.http.errors import ApiError, ClientLeft

WHOLE = "mmengine.whole"  # ASGI extension: the transport sets it if the whole body has already arrived.
SMALL_BODY = 2**13  # Bytes. Larger bodies are parsed on a thread, because parsing may take over 1 ms.
LARGE_BODY = 2**20  # Bytes. Larger bodies are parsed on a second thread.
_T = TypeVar("_T")


class BodyBudget:
    """Limits the total bytes of all bodies that are being read or prepared."""

    def __init__(self, max_body_bytes: int, max_bytes: int, timeout_s: float, rate: DrainRate):
        self._max_body, self.max_bytes, self._timeout_s = max_body_bytes, max_bytes, timeout_s
        self._rate = rate
        self.num_bytes = 0

    def reserve(
        self, added: Callable[[int, int], None] = lambda reservation, count: None
    ) -> "BodyReservation":
        """Return a reservation for a body.

        `added(held, count)` is called before `count` bytes are added to a body that has `held` bytes. A
        negative count releases bytes. The function may raise ApiError to refuse the bytes.
        """
        return BodyReservation(self, added)

    def add(self, reservation: "BodyReservation", count: int) -> None:
        """Add `count` bytes to the body. Raises ApiError if the body exceeds its limit, or if all bodies
        together exceed the budget.
        """
        if reservation.num_bytes - reservation.num_before + count > self._max_body:
            raise ApiError(
                ErrorCode.REQUEST_TOO_LARGE,
                f"the body has more than {self._max_body} bytes (max_body_bytes): send smaller or fewer "
                f"images",
                headers={"connection": "close"},
            )
        self._take(reservation, count)

    def add_before(self, reservation: "BodyReservation", count: int) -> None:
        """Add `count` bytes for the stored responses that the body continues. These bytes do not count
        against the limit for a single body. Raises ApiError if all bodies together exceed the budget.
        """
        self._take(reservation, count)
        reservation.num_before += count

    def _take(self, reservation: "BodyReservation", count: int) -> None:
        if self.num_bytes + count > self.max_bytes:
            raise ApiError(
                ErrorCode.BODIES_FULL,
                f"the request bodies in progress would exceed {self.max_bytes} bytes (max_bodies_bytes): "
                "try again later",
                headers={"retry-after": str(self._rate.retry_after_s()), "connection": "close"},
            )
        reservation.added(reservation.num_bytes, count)
        reservation.num_bytes += count
        self.num_bytes += count

    async def read(self, scope: Scope, receive: Receive, reservation: "BodyReservation") -> list[bytes]:
        """Read a body and return its chunks. Their bytes are added to `reservation`. Raises ApiError and
        ClientLeft.
        """
        headers = dict(scope["headers"])
        length = headers.get(b"content-length", b"")
        if length.isdigit() and int(length) > self._max_body:
            self.add(reservation, int(length))
        if headers.get(b"content-encoding", b"identity") != b"identity":
            raise ApiError(
                ErrorCode.BODY_COMPRESSED, "compressed bodies are not supported; send the body uncompressed"
            )
        # Most bodies have already arrived. For these bodies, setting a timeout would take longer than
        # reading.
        if WHOLE in scope["extensions"]:
            return await self._chunks(receive, reservation)
        try:
            async with asyncio.timeout(self._timeout_s):
                return await self._chunks(receive, reservation)
        except TimeoutError:
            raise ApiError(
                ErrorCode.BODY_TIMEOUT,
                f"the body did not arrive within {self._timeout_s:g} seconds (body_timeout_s)",
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
                # Some clients send a byte order mark, which RFC 8259 allows a parser to ignore.
                chunks[0] = chunks[0].removeprefix(codecs.BOM_UTF8)
                return chunks


class BodyReservation:
    """The bytes that a body takes from the budget, until `release` or the end of the `with` block.

    `num_bytes`: the total byte count. `num_before`: how many bytes in `num_bytes` belong to stored responses
    that the body continues.
    """

    def __init__(self, bodies: BodyBudget, added: Callable[[int, int], None]):
        self.num_bytes = self.num_before = 0
        self._bodies, self.added = bodies, added

    def __enter__(self) -> "BodyReservation":
        return self

    def __exit__(self, *exc: object) -> None:
        self.release()

    def release(self) -> None:
        """Release the bytes, for example when the body has become a request. The engine limits the memory for
        requests.
        """
        count, self.num_bytes, self.num_before = self.num_bytes, 0, 0
        self._bodies.num_bytes -= count
        self.added(count, -count)


class ParserThreads:
    """Parses bodies on two threads. One of the threads parses only large bodies.

    More threads would only compete for the GIL.
    """

    def __init__(self) -> None:
        self._one = ThreadPoolExecutor(1, "mmengine-parse")
        self._large = ThreadPoolExecutor(1, "mmengine-parse-large")

    async def run(self, num_bytes: int, work: Callable[[], _T]) -> _T:
        """Run `work`, which parses a body of `num_bytes` bytes, and return its result.

        Small bodies are parsed on the event loop. Raises `work`'s errors.
        """
        if num_bytes <= SMALL_BODY:
            return work()
        parser = self._large if num_bytes > LARGE_BODY else self._one
        return await asyncio.get_running_loop().run_in_executor(parser, work)
