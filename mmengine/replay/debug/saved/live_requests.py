"""Encodes a state's live requests as indices into the request table (request_table.py)."""

from operator import attrgetter
from typing import NamedTuple

import msgspec
import numpy as np

from mmengine.config import EngineConfig
from mmengine.core.snapshot.body import Known
from mmengine.core.snapshot.restoring import request_state_of
from mmengine.core.snapshot.saving import known_of
from mmengine.core.snapshot.snapshot import Live
from mmengine.core.state.grammar_slots import GrammarSlots
from mmengine.core.state.request_state import NO_ROW, RequestState
from mmengine.core.state.state import State
from mmengine.errors import CorruptLog
from mmengine.events import vocabulary as ev
from mmengine.replay.debug.saved.compression import compress, decompress
from mmengine.replay.debug.saved.request_table import RequestTable
from mmengine.request import SamplingParams

# The fields of RequestState that may change, except arrays and `held_media`.
_plain = attrgetter(
    *("rank", "row", "preempted", "num_cached", "waits_for_grammar", "num_swapped", "admitted_step"),
    *("idle_preemptions", "failures", "isolation_rows", "cancelled", "detail", "store", "num_offered"),
    "num_fetching",
)
_NO_SLOTS = GrammarSlots()
_NO_QUEUED = ev.Queued("", b"", SamplingParams())


class _Listed(msgspec.Struct, array_like=True):
    """A state's live requests. `numbers`: indices into the table, in the order of `State.requests`.
    `waiting`: indices into `numbers`, in the waiting queue's order. Both fields store int32 differences
    between neighbours.
    `changed`: (index into `numbers`, values) for each request whose values differ from the table.
    """

    numbers: bytes
    waiting: bytes
    changed: list[tuple[int, Known]]


class _Stored(NamedTuple):
    """A live request with its index in the table, and the values in the table."""

    number: int
    req_state: RequestState
    plain: tuple[object, ...]
    tokens: np.ndarray
    host_blocks: np.ndarray
    fetch_blocks: np.ndarray
    held_media: set[int]

    def is_equal(self, other: RequestState, plain: tuple[object, ...]) -> bool:
        """Return whether `other` has the values in the table. `plain`: the result of `_plain(other)`."""
        return (
            plain == self.plain
            and other.tokens is self.tokens
            and _are_same(other.host_blocks, self.host_blocks)
            and _are_same(other.fetch_blocks, self.fetch_blocks)
            and other.held_media == self.held_media
        )


class LiveRequests:
    """Encodes the live requests of states, and decodes the encoded descriptions. `config`: the states'
    settings.
    """

    def __init__(self, table: RequestTable, config: EngineConfig):
        self.table, self.config = table, config
        self._stored: dict[str, _Stored] = {}  # the live requests of the state that was described last

    def describe(self, state: State) -> bytes:
        """Return an encoded description of a state's live requests. New requests are added to the table."""
        before, stored = self._stored, dict[str, _Stored]()
        numbers: list[int] = []
        changed: list[tuple[int, Known]] = []
        for name, req_state in state.requests.items():
            plain, found = _plain(req_state), before.get(name)
            if found is None or found.req_state is not req_state:
                found = self._store(req_state, plain)
            elif not found.is_equal(req_state, plain):
                if req_state.row == NO_ROW:
                    found = self._store(req_state, plain)
                else:
                    known = known_of(req_state, _NO_SLOTS)
                    known.queued = _NO_QUEUED
                    changed.append((len(numbers), known))
            stored[name] = found
            numbers.append(found.number)
        self._stored = stored
        places = {id(req_state): place for place, req_state in enumerate(state.requests.values())}
        waiting = [places[id(req_state)] for req_state in state.waiting]
        listed = _Listed(_differences(numbers), _differences(waiting), changed)
        return compress(msgspec.msgpack.encode(listed))

    def numbers(self, description: bytes) -> np.ndarray:
        """Return the table indices of the requests in a description."""
        return _sums(_listed(description).numbers)

    def restore(self, description: bytes, state: State) -> Live:
        """Return new objects for a description's live requests, and a list of the waiting requests. The
        objects belong to `state`. Raises CorruptLog for damaged bytes.
        """
        listed = _listed(description)
        requests = self.table.take(_sums(listed.numbers).tolist(), state)
        for place, known in listed.changed:
            requests[place] = request_state_of(state, known, requests[place].request)
        return requests, [requests[place] for place in _sums(listed.waiting).tolist()]

    def in_use(self) -> np.ndarray:
        """Return the last description's table indices. The next description may use these indices again."""
        return np.array([each.number for each in self._stored.values()], np.int64)

    def _store(self, req_state: RequestState, plain: tuple[object, ...]) -> _Stored:
        number = self.table.add(known_of(req_state, _NO_SLOTS))
        arrays = req_state.tokens, req_state.host_blocks, req_state.fetch_blocks
        return _Stored(number, req_state, plain, *arrays, set(req_state.held_media))


def _are_same(one: np.ndarray, other: np.ndarray) -> bool:
    """Return whether two arrays are the same object, or are both empty. A request's arrays never change in
    place.
    """
    return one is other or not len(one) and not len(other)


def _differences(values: list[int]) -> bytes:
    return np.diff(np.array(values, np.int32), prepend=np.int32(0)).tobytes()


def _sums(differences: bytes) -> np.ndarray:
    return np.cumsum(np.frombuffer(differences, np.int32), dtype=np.int64)


def _listed(description: bytes) -> _Listed:
    try:
        return msgspec.msgpack.decode(decompress("a list of saved requests", description), type=_Listed)
    except msgspec.DecodeError as error:
        raise CorruptLog(f"a list of saved requests cannot be read: {error}") from None
