"""The parts of a state as decisions see them: they can be read, and a type checker refuses every write.

Arrays, dicts, the block pool and the encoder cache refuse it while running, too. Lists and requests are the
state's own objects there, because nothing that refuses writes is as fast to read.
"""

from collections.abc import Callable, Mapping, Sequence, Set
from types import MappingProxyType
from typing import NoReturn, Protocol, overload

import numpy as np

from mmengine.core.state.adapters import AdapterPool
from mmengine.core.state.blocks import BlockPool
from mmengine.core.state.columns import ReadOnlyArray, never_assigned
from mmengine.core.state.free_list import FreeList
from mmengine.core.state.sessions import Sessions
from mmengine.core.state.state_slots import StateSlots
from mmengine.encoder_cache.cache import EncoderCache
from mmengine.events.vocabulary import AdapterLoaded, Queued
from mmengine.request import Request


class RequestView(Protocol):
    """A RequestState."""

    @property
    def request(self) -> Request: ...
    @property
    def arrival(self) -> int: ...
    @property
    def tokens(self) -> ReadOnlyArray: ...
    @property
    def media_keys(self) -> tuple[bytes, ...]: ...
    @property
    def row(self) -> int: ...
    @property
    def num_prompt(self) -> int: ...
    @property
    def preempted(self) -> int: ...
    @property
    def num_cached(self) -> int: ...
    @property
    def waits_for_grammar(self) -> bool: ...
    @property
    def num_swapped(self) -> int: ...
    @property
    def admitted_step(self) -> int: ...
    @property
    def idle_preemptions(self) -> int: ...
    @property
    def failures(self) -> int: ...
    @property
    def isolation_rows(self) -> int: ...
    @property
    def cancelled(self) -> str: ...
    @property
    def detail(self) -> str: ...
    @property
    def held_media(self) -> Set[int]: ...
    @property
    def media_work(self) -> tuple[int, ...]: ...
    @property
    def store(self) -> int: ...
    @property
    def num_offered(self) -> int: ...
    @property
    def fetch_blocks(self) -> ReadOnlyArray: ...
    @property
    def num_fetching(self) -> int: ...


class RequestsByRow(Protocol):
    """The array of requests by row. A row that nobody holds has None, and is not asked for."""

    @overload
    def __getitem__(self, row: int, /) -> RequestView: ...
    @overload
    def __getitem__(self, rows: np.ndarray, /) -> np.ndarray: ...


class SessionView(Protocol):
    """A SessionState."""

    @property
    def session_id(self) -> str: ...
    @property
    def tokens(self) -> ReadOnlyArray: ...
    @property
    def live(self) -> str: ...
    @property
    def leased(self) -> ReadOnlyArray: ...
    @property
    def is_settled(self) -> bool: ...


class FlightView(Protocol):
    """A Flight."""

    @property
    def rows(self) -> ReadOnlyArray: ...
    @property
    def sampled(self) -> ReadOnlyArray: ...
    @property
    def asked(self) -> int: ...


class GoodputView(Protocol):
    """A Goodput."""

    def asked_behind(self, num_rows: int) -> int: ...
    def room_of(self, rows: ReadOnlyArray) -> np.ndarray | None: ...


class KeptGrammarsView(Protocol):
    """A KeptGrammars."""

    def written(self, queued: Queued) -> Queued: ...


class Face:
    """What an object shows of itself. Its attributes are given once, those with underscores for itself."""

    def __init__(self, **parts: object) -> None:
        self.__dict__.update(parts)

    def __setattr__(self, name: str, value: object) -> NoReturn:
        raise AttributeError(f"{name} is read-only: nobody but evolve writes to a state")


@never_assigned
class BlocksView(Face):
    """A BlockPool with its free list and its index."""

    num_blocks: int
    references: ReadOnlyArray  # by block
    content: ReadOnlyArray  # by block
    peek: Callable[[int], np.ndarray]
    find_first: Callable[[np.ndarray, dict[int, bytes]], np.ndarray]
    _free_list: FreeList

    def __init__(self, pool: BlockPool):
        super().__init__(
            num_blocks=pool.num_blocks,
            references=read_only(pool.references),
            content=read_only(pool.index.content),
            peek=pool.free_list.peek,
            find_first=pool.index.find_first,
            _free_list=pool.free_list,
        )

    @property
    def num_free(self) -> int:
        return self._free_list.num_free


@never_assigned
class EncoderCacheView(Face):
    """An EncoderCache."""

    capacity: int
    idle: Mapping[bytes, None]
    dropped: Sequence[bytes]
    has: Callable[[bytes], bool]
    size_of: Callable[[bytes], int]
    evictions_for: Callable[[int, set[bytes], int], list[bytes] | None]
    room: Callable[[set[bytes], int], int]
    _cache: EncoderCache

    def __init__(self, cache: EncoderCache):
        super().__init__(
            capacity=cache.capacity,
            idle=MappingProxyType(cache.idle),
            dropped=cache.dropped,
            has=cache.has,
            size_of=cache.size_of,
            evictions_for=cache.evictions_for,
            room=cache.room,
            _cache=cache,
        )

    @property
    def used(self) -> int:
        return self._cache.used

    @property
    def idle_size(self) -> int:
        return self._cache.idle_size


@never_assigned
class StatesView(Face):
    """A StateSlots."""

    find: Callable[[int], int]
    _slots: StateSlots
    _pool: BlockPool

    def __init__(self, slots: StateSlots, pool: BlockPool):
        super().__init__(find=slots.find, _slots=slots, _pool=pool)

    @property
    def num_free(self) -> int:
        return self._slots.num_free

    def peek(self, count: int) -> np.ndarray:
        """See StateSlots."""
        return self._slots.peek(count, self._pool.index.content)


@never_assigned
class AdaptersView(Face):
    """An AdapterPool."""

    of_row: Mapping[int, bytes]
    known: Mapping[str, AdapterLoaded]
    is_held: Callable[[bytes], bool]
    room_for: Callable[..., list[bytes] | None]
    _pool: AdapterPool

    def __init__(self, pool: AdapterPool):
        super().__init__(
            of_row=MappingProxyType(pool.of_row),
            known=MappingProxyType(pool.known),
            is_held=pool.is_held,
            room_for=pool.room_for,
            _pool=pool,
        )

    @property
    def num_held(self) -> int:
        return self._pool.num_held

    @property
    def there(self) -> tuple[bytes, ...]:
        """Digests of those on the device."""
        return tuple(self._pool.cache.entries)


@never_assigned
class SessionsView(Face):
    """Sessions."""

    all: Mapping[str, SessionView]
    of_request: Mapping[str, SessionView]
    leased: Callable[[], np.ndarray]
    by_age: Callable[[], Sequence[SessionView]]
    _sessions: Sessions

    def __init__(self, sessions: Sessions):
        super().__init__(
            all=MappingProxyType(sessions.all),
            of_request=MappingProxyType(sessions.of_request),
            leased=sessions.leased,
            by_age=sessions.by_age,
            _sessions=sessions,
        )

    def __len__(self) -> int:
        return len(self._sessions)

    @property
    def num_leased(self) -> int:
        return self._sessions.num_leased


def read_only(array: np.ndarray) -> np.ndarray:
    """The same values, which cannot be written through what is given here."""
    view = array.view()
    view.flags.writeable = False
    return view
