"""Queues waiting requests by tenant, and decides which tenant is served next.

A tenant is the party to which a request belongs, such as an API key's owner. While requests wait, a
tenant's debt grows by one for each token that a step computes for the tenant. The tenant with the smallest
debt is served next. This is deficit round robin with a quantum of one token.

All debts become 0 when no request waits or only one tenant is left. A tenant therefore has no disadvantage
from tokens that were computed while no other tenant waited. A single tenant's requests are served in the
policy's order.
"""

from bisect import insort
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import count

import msgspec
import numpy as np

from mmengine.core.state.columns import ReadOnlyArray
from mmengine.core.state.request_state import RequestState


@dataclass(slots=True, eq=False)
class Tenant:
    """A tenant with live requests. `number`: its index in `Tenants.debts`. `turn`: the number of its last
    admission, or 0. `waiting`: its waiting requests, sorted by rank."""

    name: str
    number: int
    num_live: int = 0
    turn: int = 0
    waiting: list[RequestState] = field(default_factory=list)


class Tenants:
    """The tenants of all live requests.

    A request's rank is a tuple. Its first `num_ahead` values, such as the priority, take precedence over the
    order of the tenants.
    """

    def __init__(self, num_rows: int, num_ahead: int, *, is_fair: bool):
        self._num_ahead, self._is_fair = num_ahead, is_fair
        self.all: dict[str, Tenant] = {}
        self.debts = np.zeros(8, np.int64)  # number of tokens, indexed by the tenant's number
        self.of_row = np.zeros(num_rows, np.intp)  # the number of the tenant in each running row
        self.turns = 0  # number of admissions since all debts were 0
        self.num_waiting = 0
        # tenant -> number of waiting requests that the current step passed over
        self.num_passed: dict[str, int] = {}

    def join(self, req_state: RequestState) -> None:
        """Add a live request to its tenant, which is created if necessary."""
        name = self._name_of(req_state)
        tenant = self.all.get(name)
        if tenant is None:
            used = {other.number for other in self.all.values()}
            tenant = self.all[name] = Tenant(name, next(n for n in count() if n not in used))
            if tenant.number == len(self.debts):
                self.debts = np.concatenate((self.debts, np.zeros_like(self.debts)))
            self.debts[tenant.number] = 0
        tenant.num_live += 1

    def leave(self, req_state: RequestState) -> None:
        """Remove a request that has ended and no longer waits."""
        tenant = self._of(req_state)
        tenant.num_live -= 1
        if not tenant.num_live:
            del self.all[tenant.name]
            self.num_passed.pop(tenant.name, None)
            if len(self.all) == 1:
                self._cancel_debts()

    def enqueue(self, req_state: RequestState) -> None:
        """Insert a waiting request, ordered by rank. If the tenant has no other waiting request, its debt is
        first raised to at least the smallest debt among tenants with waiting requests.
        """
        tenant = self._of(req_state)
        if not tenant.waiting and self.num_waiting:
            least = min(self.debts[other.number] for other in self.all.values() if other.waiting)
            self.debts[tenant.number] = max(self.debts[tenant.number], least)
        insort(tenant.waiting, req_state, key=lambda waiting: waiting.rank)
        self.num_waiting += 1

    def dequeue(self, req_state: RequestState) -> None:
        self._of(req_state).waiting.remove(req_state)
        self.num_waiting -= 1
        if not self.num_waiting:
            self._cancel_debts()

    def admit(self, req_state: RequestState, row: int) -> None:
        """Remove a request from the queue when it gets a row. All requests before this request in the service
        order are recorded as passed over by the current step.
        """
        tenant = self._of(req_state)
        if len(self.all) == 1:
            self.num_passed[tenant.name] = tenant.waiting.index(req_state)
        else:
            for each in self.rest():
                if each is req_state:
                    break
                name = self._name_of(each)
                self.num_passed[name] = self.num_passed.get(name, 0) + 1
            self.turns += 1
            tenant.turn = self.turns
        self.of_row[row] = tenant.number
        self.dequeue(req_state)

    def charge(self, rows: ReadOnlyArray | np.ndarray, num_tokens: np.ndarray | int) -> None:
        """Add the tokens that a step computes for `rows` (intp) to the debts of the rows' tenants."""
        if len(self.all) > 1 and self.num_waiting:
            np.add.at(self.debts, self.of_row[rows], num_tokens)

    def rest(self) -> Iterable[RequestState]:
        """Return the waiting requests that the current step did not pass over yet, in the order of
        service.
        """
        if len(self.all) > 1:
            return self._in_turns()
        tenant = next(iter(self.all.values()), None)
        return tenant.waiting[self.num_passed.get(tenant.name, 0) :] if tenant is not None else ()

    def passed(self) -> list[RequestState]:
        """Return the waiting requests that the current step passed over."""
        several = [self.all[name].waiting[:end] for name, end in self.num_passed.items()]
        return [req_state for waiting in several for req_state in waiting]

    def saved(self) -> tuple[tuple[str, int, int, int], ...]:
        """Return (name, debt, turn, number of passed requests) for each tenant, sorted by name."""
        names = sorted(self.all)
        tenants = (self.all[name] for name in names)
        return tuple(
            (each.name, int(self.debts[each.number]), each.turn, self.num_passed.get(each.name, 0))
            for each in tenants
        )

    def restore(self, saved: Iterable[tuple[str, int, int, int]], turns: int) -> None:
        """Restore the values that `saved` returned. Call `join` for all live requests first."""
        self.turns = turns
        for name, debt, turn, num_passed in saved:
            tenant = self.all[name]
            self.debts[tenant.number], tenant.turn = debt, turn
            if num_passed:
                self.num_passed[name] = num_passed

    def restore_waiting(self, waiting: Iterable[RequestState]) -> None:
        """Add the waiting requests of a saved state, sorted by rank. `restore` then sets the debts."""
        for req_state in waiting:
            self._of(req_state).waiting.append(req_state)
            self.num_waiting += 1

    def restore_row(self, req_state: RequestState) -> None:
        self.of_row[req_state.row] = self._of(req_state).number

    def digest_parts(self) -> bytes:
        """Return all tenants' debts and turns as bytes, or b"" for fewer than two tenants."""
        if len(self.all) < 2:
            return b""
        return msgspec.msgpack.encode((self.turns, [each[:3] for each in self.saved()]))

    def _name_of(self, req_state: RequestState) -> str:
        return req_state.request.tenant if self._is_fair else ""

    def _of(self, req_state: RequestState) -> Tenant:
        return self.all[self._name_of(req_state)]

    def _cancel_debts(self) -> None:
        self.debts[:] = 0
        self.turns = 0
        for tenant in self.all.values():
            tenant.turn = 0

    def _in_turns(self) -> Iterator[RequestState]:
        places = {each: self.num_passed.get(each.name, 0) for each in self.all.values()}
        places = {each: place for each, place in places.items() if place < len(each.waiting)}

        def order(tenant: Tenant) -> tuple[int, int, int]:
            return int(self.debts[tenant.number]), tenant.turn, tenant.waiting[places[tenant]].arrival

        tenants, ahead = sorted(places, key=order), self._num_ahead
        while tenants:
            first = min(tenant.waiting[places[tenant]].rank[:ahead] for tenant in tenants)
            for tenant in tenants:
                for req_state in tenant.waiting[places[tenant] :]:
                    if req_state.rank[:ahead] != first:
                        break
                    places[tenant] += 1
                    yield req_state
            tenants = [tenant for tenant in tenants if places[tenant] < len(tenant.waiting)]
