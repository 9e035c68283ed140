"""Read-only views of a state's parts: a type checker refuses every write through a view.

Arrays, dicts, pools and caches refuse writes at run time, too. Lists and requests are the state's own objects
at run time, because no object that refuses writes is as fast to read.
"""

from collections.abc import Callable, Mapping, Sequence, Set
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
# An attribute that the target replaces over time: a view reads it from the target at each access.
Current = Annotated[T, "current"]


@dataclass_transform(frozen_default=True)
class ReadOnly:
    """Another object's view, the target: shows the attributes that a subclass declares, under the same
    names.

    The view reads `Current` attributes at each access and all others once, when it is made. It shows arrays
    without write access and dicts as mapping proxies, and wraps objects whose annotation is a ReadOnly class.
    """

    _shown: ClassVar[dict[str, Any]] = {}  # annotations by name, except `Current` annotations
    _target: Any

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        hints = get_type_hints(cls, include_extras=True)
        cls._shown = {}
        for name, hint in hints.items():
            if "current" in getattr(hint, "__metadata__", ()):
                setattr(cls, name, property(attrgetter(f"_target.{name}")))  # needs no call of Python code
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
    """A RequestState. At run time the state's own object stands in its place."""

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
    """The request array by row. A free row holds None; callers do not ask for free rows."""

    @overload
    def __getitem__(self, row: int, /) -> RequestView: ...
    @overload
    def __getitem__(self, rows: np.ndarray, /) -> np.ndarray: ...


class RunningView(ReadOnly):
    """The running batch: its rows in admission order, intp, and their requests."""

    running: Current[ReadOnlyArray]
    requests_by_row: RequestsByRow


class SessionView(ReadOnly):
    """A SessionState. At run time the state's own object stands in its place."""

    session_id: str
    tokens: ReadOnlyArray
    live: str
    leased: ReadOnlyArray
    is_settled: bool


class FlightView(ReadOnly):
    """A Flight. At run time the state's own object stands in its place."""

    rows: ReadOnlyArray
    sampled: ReadOnlyArray
    draft_level: int


class GoodputView(ReadOnly):
    """A Goodput. At run time the state's own object stands in its place."""

    draft_level_after: Callable[[int], int]
    draft_limits_of: Callable[[ReadOnlyArray], np.ndarray | None]


class GrammarSlotsView(ReadOnly):
    """A GrammarSlots."""

    written: Callable[[Queued], Queued]


class BlocksView(ReadOnly):
    """A BlockPool with its free list and its index. `references`, `content`: by block."""

    num_blocks: int
    num_free: Current[int]
    references: ReadOnlyArray
    content: ReadOnlyArray
    peek: Callable[[int], np.ndarray]
    find_first: Callable[[np.ndarray, dict[int, bytes]], np.ndarray]


class EncoderCacheView(ReadOnly):
    """An EncoderCache."""

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
    """A StateSlots."""

    num_free: Current[int]
    find: Callable[[int], int]
    peek: Callable[[int], np.ndarray]


class AdaptersView(ReadOnly):
    """An AdapterPool."""

    num_held: Current[int]
    loaded: Current[tuple[bytes, ...]]
    of_row: Mapping[int, bytes]
    known: Mapping[str, AdapterLoaded]
    is_held: Callable[[bytes], bool]
    room_for: Callable[..., list[bytes] | None]


class SessionsView(ReadOnly):
    """Sessions."""

    num_leased: Current[int]
    all: Mapping[str, SessionView]
    of_request: Mapping[str, SessionView]
    leased: Callable[[], np.ndarray]
    by_age: Callable[[], Sequence[SessionView]]

    def __len__(self) -> int:
        return len(self.all)
