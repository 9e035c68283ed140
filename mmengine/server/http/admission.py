"""Decides whether the server accepts a call. The decision depends on the engine's readiness, on a shutdown in
progress, and on the API key's fair share.
"""

import asyncio
from collections import Counter
from collections.abc import Iterable
from functools import partial

from mmengine.errors import ErrorCode
from mmengine.serve.async_engine.served_engine import ServedEngine
from mmengine.server.http.auth import ApiKeys
from mmengine.server.http.body_reader import BodyBudget, BodyReservation
from mmengine.server.http.drain_rate import DrainRate
from mmengine.server.http.errors import (
    LATER_S,
    ApiError,
    interrupted_error,
    log_error,
    not_ready_error,
    shutdown_error,
)
from mmengine.server.settings import ServerSettings

OWNER = "mmengine.owner"  # Key in the ASGI scope: the call's owner.
WATCH_S = 0.5  # Seconds between two checks whether the log can be written.


class Admission:
    """Decides which calls are admitted, and owns the byte budget for request bodies."""

    def __init__(self, engine: ServedEngine, settings: ServerSettings, keys: ApiKeys):
        self._engine, self._keys = engine, keys
        self._shares_cache = settings.share_prefix_cache
        self.rate = DrainRate()
        self.bodies = BodyBudget(
            settings.max_body_bytes, settings.max_bodies_bytes, settings.body_timeout_s, self.rate
        )
        self.shares = FairShares(engine.max_open, settings.key_share, self.bodies, self.rate)
        self.is_ending = False  # Health checks report the shutdown, so that clients send no more calls.
        self.is_draining = False  # New calls are refused.
        # The reason why the log cannot be written, or "". While there is a reason, running calls cannot
        # continue.
        self._stuck = ""
        self._tasks: set[asyncio.Task[object]] = set()  # The admitted calls' tasks.

    def tenant_of(self, owner: str) -> str:
        """Return the tenant for the owner's requests, or "" if no API keys are configured."""
        return self._keys.tenant_of(owner)

    def keep_tenants(self, recovered: Iterable[tuple[str, str]]) -> None:
        """Restore each owner's tenant from the previous process. `recovered`: pairs (request id in the log,
        tenant).
        """
        for request_id, tenant in recovered:
            self._keys.keep_tenant(request_id.partition(":")[0], tenant)

    def salt_of(self, owner: str) -> str:
        """Return the cache salt for requests that do not set a salt. Each key has its own salt. Returns "" if
        no keys are configured, or if the keys share the prefix cache.
        """
        return "" if self._shares_cache else self._keys.salt_of(owner)

    @property
    def has_several_keys(self) -> bool:
        """Whether the server has several keys. Each key may then use only a limited share of the server."""
        return self._keys.are_several

    def take(self, owner: str) -> None:
        """Admit a call with this owner, and count it until `give` is called. Raises ApiError if the call is
        refused.
        """
        if (why := self.draining()) is not None:
            raise why
        reasons = self._of_engine()
        if reasons:
            raise not_ready_error(reasons, self.retry_later_s())
        self.shares.take(owner, is_alone=not self._keys.are_several)
        if (task := asyncio.current_task()) is not None:
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def watch(self) -> None:
        """Watch the log, until cancelled. If the log cannot be written for STUCK_S seconds
        (serve/requests/health.py), cancel all admitted calls' tasks, which then send `stuck_error`.
        """
        while True:
            stuck = self._engine.readiness().stuck
            if stuck and not self._stuck:
                for task in self._tasks:
                    task.cancel()
            self._stuck = stuck
            await asyncio.sleep(WATCH_S)

    def give(self, owner: str) -> None:
        self.shares.give(owner)

    def reserve(self, owner: str) -> BodyReservation:
        """Return a reservation for the body of a call with this owner."""
        return self.shares.reserve(owner, is_alone=not self._keys.are_several)

    def reasons(self) -> tuple[str, ...]:
        """Return the reasons why clients should not send calls now. Internal details are left out."""
        if self.is_ending or self.is_draining:
            return (shutdown_error(self.retry_later_s()).message,)
        return self._of_engine()

    @property
    def is_frozen(self) -> bool:
        """Whether an engine step hangs, so that only a process restart helps."""
        return self._engine.readiness().is_frozen

    def _of_engine(self) -> tuple[str, ...]:
        return self._engine.readiness().public_reasons

    def draining(self) -> ApiError | None:
        return shutdown_error(self.retry_later_s()) if self.is_draining else None

    def stuck_error(self, request_id: str, *, can_reattach: bool) -> ApiError | None:
        """Return the error for a call that ends because the log cannot be written. Returns None if the log is
        writable or the server shuts down. `can_reattach`: whether a later call may get the answer.
        """
        if not self._stuck or self.is_draining:
            return None
        return log_error(request_id, self._stuck, can_reattach, self.retry_later_s())

    def interrupted_error(self, request_id: str, *, can_reattach: bool) -> ApiError:
        """Return the error for a call that the server's shutdown interrupts. `can_reattach`: whether a later
        call may get the answer.
        """
        stays = self._engine.has_log or (can_reattach and self._engine.keeps_held)
        return interrupted_error(request_id, stays, self.retry_later_s())

    def retry_later_s(self) -> int:
        """Return the estimated number of seconds until all open calls have ended."""
        return max(LATER_S, self.rate.retry_after_s(self.rate.num_open))


class FairShares:
    """Limits each API key's open calls and body bytes to its share.

    `limit`: maximum number of open calls, for all keys together. `share`: the fraction of `limit` and of the
    body bytes that each key may use if several keys are configured.
    """

    def __init__(self, limit: int, share: float, bodies: BodyBudget, rate: DrainRate):
        self._most = max(1, int(limit * share))
        self._most_bytes = int(bodies.max_bytes * share)
        self._bodies, self._rate = bodies, rate
        self._open: Counter[str] = Counter()
        self._held: Counter[str] = Counter()  # Body bytes of each owner.

    def take(self, owner: str, *, is_alone: bool) -> None:
        """Count a call with this owner until `give` is called. Raises ApiError if the owner already has its
        share of open calls.
        """
        if not is_alone and self._open[owner] >= self._most:
            raise self._refused(
                owner,
                f"this API key has {self._most} open calls, its share of the server (key_share); "
                "try again later",
            )
        self._open[owner] += 1
        self._rate.begin()

    def give(self, owner: str) -> None:
        self._open[owner] -= 1
        if not self._open[owner]:
            del self._open[owner]
        self._rate.end()

    def reserve(self, owner: str, *, is_alone: bool) -> BodyReservation:
        """Return a reservation for the body of a call with this owner. If a key has only a single body, this
        body may exceed the share. `is_alone`: whether the server has a single key, to which no share applies.
        """
        return self._bodies.reserve(partial(self._added, owner, is_alone))

    def _added(self, owner: str, is_alone: bool, held: int, count: int) -> None:
        """Add `count` bytes to a body that has `held` bytes so far. Raises ApiError if the key would exceed
        its share.
        """
        others = self._held[owner] - held
        if count > 0 and not is_alone and others and self._held[owner] + count > self._most_bytes:
            raise self._refused(
                owner,
                f"the request bodies of this API key have {self._held[owner]} bytes; its share is "
                f"{self._most_bytes} (key_share): try again later",
            )
        self._held[owner] += count
        if not self._held[owner]:
            del self._held[owner]

    def _refused(self, owner: str, text: str) -> ApiError:
        # About this many calls end before a call with this key ends.
        num_others = self._rate.num_open / max(1, self._open[owner])
        return ApiError(
            ErrorCode.KEY_SHARE_FULL,
            text,
            headers={"retry-after": str(self._rate.retry_after_s(num_others)), "connection": "close"},
        )

    @property
    def num_open(self) -> int:
        return self._open.total()

    @property
    def num_bytes(self) -> int:
        """The total bytes of all bodies, summed over the keys."""
        return self._held.total()
