"""The values that breakpoints and expressions can read at a position. All values are numbers, names or
copies, so that an expression cannot change the state.
"""

from collections.abc import Iterator, Mapping
from typing import NamedTuple

import numpy as np

from mmengine.core.state.request_state import NO_ROW
from mmengine.core.state.state import State
from mmengine.core.state.view import View
from mmengine.errors import InvalidRequest
from mmengine.events import vocabulary as ev
from mmengine.replay.debug.navigator import Cursor


class RequestFacts(NamedTuple):
    """A live request. `row`: its row, or -1 while it waits. `preempted`: whether the request was ever
    preempted.
    """

    request_id: str
    row: int
    prompt: int
    tokens: int
    computed: int
    blocks: int
    drafts: int
    preempted: bool
    priority: int


class BlockFacts(NamedTuple):
    """A KV block. `content`: the id of its cached content, or -1."""

    block: int
    references: int
    content: int


class EntryFacts(NamedTuple):
    """An entry in the encoder cache. `size`: the number of its embeddings. `valid`: False if the step that
    encoded it failed.
    """

    key: str
    size: int
    references: int
    valid: bool


class RowFacts(NamedTuple):
    """A row. `request`: the id of its request, or ""."""

    row: int
    request: str
    tokens: int
    computed: int
    blocks: int
    scheduled: int
    drafts: int


ObjectFacts = RequestFacts | BlockFacts | EntryFacts | RowFacts

# The fields of the filter language, with their descriptions.
FIELDS = {
    "position": "number of the next record",
    "step": "the open step, or the next one",
    "time_ms": "time since the log's first record, in ms",
    "event": "kind of the next record, such as Preempted",
    "request": "request that the next record names, or ''",
    "reason": "reason that the next record gives, or ''",
    "free_blocks": "free KV blocks",
    "running": "number of running requests",
    "waiting": "number of waiting requests",
    "live": "number of live requests",
    "tokens_left": "tokens that the open step may still schedule",
    "encoder_used": "embeddings in the encoder cache",
    "in_flight": "steps in flight",
    "preemptions": "preemptions so far",
    "arrived": "requests that have arrived",
    "sessions": "open sessions",
    "leased_blocks": "blocks that sessions lease",
    "adapters": "loaded adapters",
}
OF_THE_RECORD = frozenset(("position", "event", "request", "reason", "record"))
# The functions that a Python expression may call, with the fields of their results.
OBJECTS: dict[str, tuple[str, ...]] = {
    "req": RequestFacts._fields,
    "block": BlockFacts._fields,
    "entry": EntryFacts._fields,
    "row": RowFacts._fields,
}


class Facts(Mapping[str, object]):
    """The values at a cursor's position. Each access reads the cursor's current state."""

    def __init__(self, cursor: Cursor):
        self.cursor = cursor
        self._view: tuple[State, View] | None = None

    def field(self, name: str) -> object:
        """Return the value of a field in FIELDS."""
        value: object = getattr(self, f"_{name}")()
        return value

    def req(self, name: str) -> RequestFacts | None:
        """Return a live request, or None if there is no such request."""
        state = self._state
        req_state = state.requests.get(name)
        if req_state is None:
            return None
        row, first = req_state.row, (name, req_state.row, req_state.num_prompt)
        priority = req_state.request.priority
        if row == NO_ROW:
            tokens = len(req_state.tokens)
            return RequestFacts(*first, tokens, 0, 0, 0, req_state.preempted > 0, priority)
        numbers = (state.num_tokens, state.num_computed, state.num_blocks, state.num_drafts)
        tokens, computed, blocks, drafts = (int(column[row]) for column in numbers)
        return RequestFacts(*first, tokens, computed, blocks, drafts, req_state.preempted > 0, priority)

    def block(self, number: int) -> BlockFacts | None:
        """Return a KV block, or None if no block has this number."""
        pool = self._state.blocks
        if not 0 <= number < pool.num_blocks:
            return None
        return BlockFacts(number, int(pool.references[number]), int(pool.content[number]))

    def entry(self, prefix: str) -> EntryFacts | None:
        """Return the encoder cache entry whose key begins with the hexadecimal digits `prefix`, or None.
        Raises InvalidRequest if several keys begin with `prefix`.
        """
        entries = self._state.encoder.entries
        found = [key for key in entries if key.hex().startswith(prefix.lower())]
        if len(found) > 1:
            raise InvalidRequest(f"{len(found)} entries begin with {prefix!r}; give more digits")
        if not found:
            return None
        entry = entries[found[0]]
        return EntryFacts(found[0].hex(), entry.size, entry.references, entry.valid)

    def row(self, number: int) -> RowFacts | None:
        """Return a row, or None if no row has this number."""
        state = self._state
        if not 0 <= number < state.config.num_rows:
            return None
        held = state.requests_by_row[number]
        numbers = (state.num_tokens, state.num_computed, state.num_blocks, state.scheduled, state.num_drafts)
        name = "" if held is None else held.request.request_id
        return RowFacts(number, name, *(int(column[number]) for column in numbers))

    def __getitem__(self, name: str) -> object:
        """Return the value for a name in a Python expression: a field, a function in OBJECTS, `record`,
        `view` or `np`. Raises KeyError for any other name.
        """
        if name in FIELDS:
            return self.field(name)
        if name in OBJECTS:
            function: object = getattr(self, name)
            return function
        if name == "view":
            if self._view is None or self._view[0] is not self._state:
                self._view = self._state, View(self._state)
            return self._view[1]
        return {"record": self.cursor.record, "np": np}[name]

    def __iter__(self) -> Iterator[str]:
        return iter((*FIELDS, *OBJECTS, "view", "record", "np"))

    def __len__(self) -> int:
        return len(tuple(iter(self)))

    @property
    def _state(self) -> State:
        return self.cursor.state

    @property
    def _next(self) -> ev.Event | None:
        return None if self.cursor.record is None else self.cursor.record.event

    def _position(self) -> int:
        return self.cursor.position

    def _step(self) -> int:
        return self._state.step

    def _time_ms(self) -> float:
        return self.cursor.time_ns / 1e6

    def _event(self) -> str:
        return "" if self._next is None else type(self._next).__name__

    def _request(self) -> str:
        return str(getattr(self._next, "request_id", ""))

    def _reason(self) -> str:
        return str(getattr(self._next, "reason", ""))

    def _free_blocks(self) -> int:
        return self._state.blocks.num_free

    def _running(self) -> int:
        return len(self._state.running)

    def _waiting(self) -> int:
        return len(self._state.waiting)

    def _live(self) -> int:
        return len(self._state.requests)

    def _tokens_left(self) -> int:
        return self._state.tokens_left

    def _encoder_used(self) -> int:
        return self._state.encoder.used

    def _in_flight(self) -> int:
        return len(self._state.flights)

    def _preemptions(self) -> int:
        return self._state.num_preempted

    def _arrived(self) -> int:
        return self._state.num_arrived

    def _sessions(self) -> int:
        return len(self._state.sessions)

    def _leased_blocks(self) -> int:
        return self._state.sessions.num_leased

    def _adapters(self) -> int:
        return len(self._state.adapters.cache.entries)
