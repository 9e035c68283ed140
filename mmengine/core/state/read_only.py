"""Read-only views of the engine's state, for the scheduling functions.

A type checker reports every write through a view. Arrays, dicts, pools and caches also refuse writes at run
time. Lists and requests do not refuse writes: a wrapper would make reading slower.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from operator import attrgetter
from types import MappingProxyType
from typing import (
    Annotated,
    Any,
    ClassVar,
    NoReturn,
    Protocol,
    Self,
    TypeVar,
    dataclass_transform,
    get_type_hints,
    overload,
)

import numpy as np

from mmengine.core.state.columns import ReadOnlyArray
from mmengine.events.vocabulary import AdapterLoaded, Queued
from mmengine.request import Request

T = TypeVar("T")
# Marks an attribute that the state may rebind. A view reads the attribute from the state at each access.
Current = Annotated[T, "current"]


@dataclass_transform(frozen_default=True)
class ReadOnly:
    """A read-only view of another object, its target. A subclass declares the attributes that the view shows.

    `Current` attributes are read from the target at each access. All other attributes are read once, when the
    view is created. Arrays become views without write access, and dicts become mapping proxies. If an
    attribute's annotation is a ReadOnly class, the value is wrapped in this class.
    """

    _shown: ClassVar[dict[str, Any]] = {}  # attribute name -> annotation, without `Current` attributes
    _target: Any

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        hints = get_type_hints(cls, include_extras=True)
        cls._shown = {}
        for name, hint in hints.items():
            if "current" in getattr(hint, "__metadata__", ()):
                setattr(cls, name, property(attrgetter(f"_target.{name}")))  # runs no Python code at access
            elif not name.startswith("_"):
                cls._shown[name] = hint

    @classmethod
    def of(cls, target: object) -> Self:
        """Return a view of `target`."""
        view = cls.__new__(cls)
        view._show(target)
        return view

    def _show(self, target: object) -> None:
        shown = {name: _read_only(getattr(target, name), hint) for name, hint in self._shown.items()}
        self.__dict__.update(shown, _target=target)

    def __setattr__(self, name: str, value: object) -> NoReturn:
        raise AttributeError(f"{name} is read-only: only evolve writes to a state")


def _read_only(value: Any, hint: Any) -> Any:
    if isinstance(value, np.ndarray):
        value = value.view()
        value.flags.writeable = False
        return value
    if isinstance(value, dict):
        return MappingProxyType(value)
    return hint.of(value) if isinstance(hint, type) and issubclass(hint, ReadOnly) else value


class RequestView(ReadOnly):
    """The read-only type for a RequestState. At run time the object is the state's RequestState itself."""

    request: Request
    arrival: int
    tokens: ReadOnlyArray
    media_keys: tuple[bytes, ...]
    row: int
    num_prompt: int
    preempted: int
    num_cached: int
    waits_for_grammar: bool
    num_swapped: int
    admitted_step: int
    idle_preemptions: int
    failures: int
    isolation_rows: int
    cancelled: str
    detail: str
    held_media: Set[int]
    media_work: tuple[int, ...]
    store: int
    num_offered: int
    fetch_blocks: ReadOnlyArray
    num_fetching: int


class RequestsByRow(Protocol):
    """The type for `State.requests_by_row`: the request in each row. The type leaves out None, the value in a
    row without a request, because callers never read such rows.
    """

    @overload
    def __getitem__(self, row: int, /) -> RequestView: ...
    @overload
    def __getitem__(self, rows: np.ndarray, /) -> np.ndarray: ...


class RunningView(ReadOnly):
    """The running batch: its rows in admission order (intp), and the requests in these rows."""

    running: Current[ReadOnlyArray]
    requests_by_row: RequestsByRow


class SessionView(ReadOnly):
    """The read-only type for a SessionState. At run time the object is the state's SessionState itself."""

    session_id: str
    tokens: ReadOnlyArray
    live: str
    leased: ReadOnlyArray
    is_settled: bool


class FlightView(ReadOnly):
    """The read-only type for a Flight. At run time the object is the state's Flight itself."""

    rows: ReadOnlyArray
    sampled: ReadOnlyArray
    draft_level: int
    num_scheduled: ReadOnlyArray | None


class GoodputView(ReadOnly):
    """The read-only type for a Goodput. At run time the object is the state's Goodput itself."""

    draft_level_after: Callable[[int], int]
    draft_limits_of: Callable[[ReadOnlyArray], np.ndarray | None]


class GrammarSlotsView(ReadOnly):
    """A read-only GrammarSlots object."""

    written: Callable[[Queued], Queued]


class BlocksView(ReadOnly):
    """A read-only BlockPool with its free list and its prefix index. `references` and `content` have an entry
    for each block.
    """

    num_blocks: int
    num_free: Current[int]
    references: ReadOnlyArray
    content: ReadOnlyArray
    peek: Callable[[int], np.ndarray]
    find_first: Callable[[np.ndarray, dict[int, bytes]], np.ndarray]
    find_windows: Callable[[np.ndarray], np.ndarray]
    window_content: ReadOnlyArray
    order_after_release: Callable[[list[np.ndarray]], tuple[np.ndarray, np.ndarray]]


class WindowsView(ReadOnly):
    """A read-only WindowTables object."""

    num_groups: int
    tables: ReadOnlyArray
    release_at: ReadOnlyArray
    order: ReadOnlyArray
    windows: ReadOnlyArray
    first_needed: Callable[[np.ndarray | int], np.ndarray]
    skipped: Callable[[int, int], list[np.ndarray]]
    in_settings_order: Callable[[np.ndarray, list[np.ndarray]], list[np.ndarray]]


class EncoderCacheView(ReadOnly):
    """A read-only EncoderCache object."""

    capacity: int
    used: Current[int]
    idle_size: Current[int]
    idle: Mapping[bytes, None]
    dropped: Sequence[bytes]
    has: Callable[[bytes], bool]
    size_of: Callable[[bytes], int]
    evictions_for: Callable[[int, set[bytes], int], list[bytes] | None]
    room: Callable[[set[bytes], int], int]


class StatesView(ReadOnly):
    """A read-only StateSlots object."""

    num_free: Current[int]
    find: Callable[[int], int]
    peek: Callable[[int], np.ndarray]


class AdaptersView(ReadOnly):
    """A read-only AdapterPool object."""

    num_held: Current[int]
    loaded: Current[tuple[bytes, ...]]
    of_row: Mapping[int, bytes]
    known: Mapping[str, AdapterLoaded]
    is_held: Callable[[bytes], bool]
    room_for: Callable[..., list[bytes] | None]


class TenantsView(ReadOnly):
    """A read-only Tenants object."""

    rest: Callable[[], Iterable[RequestView]]
    passed: Callable[[], Sequence[RequestView]]


class SessionsView(ReadOnly):
    """A read-only Sessions object."""

    num_leased: Current[int]
    all: Mapping[str, SessionView]
    of_request: Mapping[str, SessionView]
    leased: Callable[[], np.ndarray]
    by_age: Callable[[], Sequence[SessionView]]

    def __len__(self) -> int:
        return len(self.all)
