"""Which calls are taken, and what those that are may hold."""

from mmengine.serve.async_engine.served_engine import ServedEngine
from mmengine.server.http.auth import ApiKeys
from mmengine.server.http.body_reader import Bodies, Held
from mmengine.server.http.drain_rate import DrainRate
from mmengine.server.http.errors import (
    LATER_S,
    ApiError,
    left_behind,
    not_ready,
    shutting_down,
)
from mmengine.server.http.fair_shares import Shares
from mmengine.server.settings import ServerSettings

OWNER = "mmengine.owner"  # in a scope: whose call it is


class Admission:
    def __init__(self, engine: ServedEngine, settings: ServerSettings, keys: ApiKeys):
        self._engine, self._keys = engine, keys
        self.rate = DrainRate()
        self.bodies = Bodies(
            settings.max_body_bytes, settings.max_bodies_bytes, settings.body_timeout_s, self.rate
        )
        self.shares = Shares(engine.max_open, settings.key_share, self.bodies, self.rate)
        self.is_ending = False  # nobody should send another call
        self.is_draining = False  # none is taken

    @property
    def has_several_keys(self) -> bool:
        """Whether one of them must leave room for others."""
        return self._keys.are_several

    def take(self, owner: str) -> None:
        """A call of this key begins; `give` ends it. Raises ApiError."""
        if (why := self.draining()) is not None:
            raise why
        reasons = self._of_engine()
        if reasons:
            raise not_ready(reasons, self.retry_later_s())
        self.shares.take(owner, is_alone=not self._keys.are_several)

    def give(self, owner: str) -> None:
        self.shares.give(owner)

    def holding(self, owner: str) -> Held:
        """Room for a body of this key."""
        return self.shares.holding(owner, is_alone=not self._keys.are_several)

    def reasons(self) -> tuple[str, ...]:
        """Why no call should be sent here, for anybody to read."""
        if self.is_ending or self.is_draining:
            return (shutting_down(self.retry_later_s()).message,)
        return self._of_engine()

    def _of_engine(self) -> tuple[str, ...]:
        return self._engine.readiness().public_reasons

    def draining(self) -> ApiError | None:
        return shutting_down(self.retry_later_s()) if self.is_draining else None

    def left_behind(self, request_id: str, *, is_held: bool) -> ApiError:
        """What the caller of a request hears that the server's end cuts. `is_held`: whether others may ask
        for its answer."""
        stays = self._engine.has_log or (is_held and self._engine.keeps_held)
        return left_behind(request_id, stays, self.retry_later_s())

    def retry_later_s(self) -> int:
        """When all who are here are likely to have left."""
        return max(LATER_S, self.rate.retry_after_s(self.rate.num_open))
