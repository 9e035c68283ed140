"""What is known of each row of the running batch, as columns: a value for each row.

Said once, for a state, which holds arrays, and for a view, which holds the same arrays as nobody may write
them. The dtype stands in the annotation and is read from there when a state makes its arrays.
"""

from typing import Annotated, Any, Generic, Protocol, TypeVar, dataclass_transform, get_type_hints

import numpy as np

NEVER = np.int32(2**31 - 1)
# Values of the column `ended`. LOST: the step that the row was in failed as a whole. LEFT: the request
# is gone, a step in flight still names the row. CRASHED: the process that held the row is gone.
RUNS_ON, STOPPED, BROKEN, LOST, LEFT, CRASHED = 0, 1, 2, 3, 4, 5


class ReadOnlyArray(Protocol):
    """A numpy array, but for what writes to it. What is computed from it is an array like any other."""

    def __getitem__(self, key: Any, /) -> Any: ...
    def __len__(self) -> int: ...
    def __contains__(self, value: object, /) -> bool: ...
    def __array__(self) -> np.ndarray: ...
    def __eq__(self, other: object, /) -> Any: ...
    def __ne__(self, other: object, /) -> Any: ...
    def __ge__(self, other: Any, /) -> Any: ...
    def tolist(self) -> Any: ...
    def tobytes(self) -> bytes: ...
    def astype(self, dtype: type[np.signedinteger[Any]], /) -> np.ndarray: ...


Array = TypeVar("Array", bound=ReadOnlyArray, covariant=True)
Class = TypeVar("Class")
Int8 = Annotated[Array, np.int8]
Int32 = Annotated[Array, np.int32]
Int64 = Annotated[Array, np.int64]


@dataclass_transform(frozen_default=True)
def never_assigned(cls: type[Class]) -> type[Class]:
    """Tell a type checker that nobody assigns to the attributes which the class declares."""
    return cls


@never_assigned
class RowColumns(Generic[Array]):
    """What a decision depends on, and a digest says."""

    num_tokens: Int32[Array]  # known
    num_computed: Int32[Array]  # whose KV is there, or will be when the open step has run
    max_total: Int32[Array]  # known tokens at which the request ends by length; of a free row: NEVER
    num_blocks: Int32[Array]  # held
    next_media: Int32[Array]  # start of the first embedding run not computed yet, or NEVER
    release_at: Int32[Array]  # computed tokens at which an encoder reference may go, or NEVER
    num_filled: Int32[Array]  # full blocks whose content is recorded
    scheduled: Int32[Array]  # tokens in the open step
    scheduled_drafts: Int32[Array]  # how many of them, at their end, are drafts
    num_drafts: Int32[Array]  # drafts behind the known tokens, for the next step
    drafter: Int32[Array]  # who made them
    plain_from: Int32[Array]  # blocks from this token on overlap no media and no salt
    content: Int64[Array]  # content id of the last full block, the parent of the next
    ended: Int8[Array]


@never_assigned
class FlightColumns(Generic[Array]):
    """All zero where no step is decided before the one before it ran."""

    in_flight: Int32[Array]  # dispatched steps that name the row
    num_pending: Int32[Array]  # tokens that they will give it
    # Tokens, known and pending, at which it waits for those steps: of a row with a form minus that, and 0
    # where it waits at each.
    runs_ahead_to: Int32[Array]


@never_assigned
class StateColumns(Generic[Array]):
    """Of models whose rows have recurrent states; else all zero."""

    state_slot: Int32[Array]  # the row's, or NO_STATE
    keep_at: Int32[Array]  # tokens behind which its state is kept next, or NEVER
    num_shared: Int32[Array]  # tokens of its beginning that others' blocks held when it got the row


@never_assigned
class WideColumns(Generic[Array]):
    """int32, many values for each row."""

    token_ids: Array  # [row, place]: known tokens, and the drafts behind them
    block_table: Array  # [row, number of a block]; behind a row's blocks it holds 0, the dummy


class Columns(RowColumns[Array], FlightColumns[Array], StateColumns[Array], WideColumns[Array]):
    """All of them."""


def _dtypes(columns: type) -> dict[str, type[np.signedinteger]]:
    hints = get_type_hints(columns, include_extras=True)
    return {name: hint.__metadata__[0] for name, hint in hints.items()}


ROW_COLUMNS, FLIGHT_COLUMNS = _dtypes(RowColumns), _dtypes(FlightColumns)
COLUMNS = {**ROW_COLUMNS, **FLIGHT_COLUMNS}  # dtypes by name
STATE_COLUMNS = _dtypes(StateColumns)
WIDE_COLUMNS = tuple(get_type_hints(WideColumns))


def frozen(array: np.ndarray) -> np.ndarray:
    """The array, which nobody writes any more."""
    array.flags.writeable = False
    return array


def make_columns(rows: int, num_tokens: int, num_blocks: int) -> dict[str, np.ndarray]:
    """All columns by name, zero. A row has room for so many tokens and blocks."""
    columns = {name: np.zeros(rows, dtype) for name, dtype in {**COLUMNS, **STATE_COLUMNS}.items()}
    return {
        **columns,
        "token_ids": _wide_column(rows, num_tokens),
        "block_table": _wide_column(rows, num_blocks),
    }


def _wide_column(rows: int, width: int) -> np.ndarray:
    """Zeros, int32 [rows, width]. Rows lie an odd number of cache lines apart: at powers of two, equal
    places of all rows would share a few sets of the cache."""
    lines = -(-width // 16) | 1
    return np.zeros((rows, lines * 16), np.int32)[:, :width]
