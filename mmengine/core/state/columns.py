"""Declares the running batch's columns: numpy arrays whose first axis is the row.

The state has writable arrays, and its view has the same arrays without write access. A column's annotation
contains the array's dtype.
"""

from typing import Annotated, Any, Generic, Protocol, TypeVar, dataclass_transform, get_type_hints

import numpy as np

NEVER = np.int32(2**31 - 1)
# Values of the column `ended`. RUNS_ON: the request continues. STOPPED: a stop condition ended the text.
# BROKEN: only this row failed, for example with NaN logits. LOST: the row's whole step failed. LEFT: the
# request has left, but a step in flight still computes the row. CRASHED: the process that computed the row
# died.
RUNS_ON, STOPPED, BROKEN, LOST, LEFT, CRASHED = 0, 1, 2, 3, 4, 5


class ReadOnlyArray(Protocol):
    """A numpy array without the methods that write."""

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
    """Tell type checkers that the class's attributes are never assigned."""
    return cls


@never_assigned
class RowColumns(Generic[Array]):
    """Columns for all models. The state's digest covers these columns."""

    num_tokens: Int32[Array]  # number of known tokens
    num_computed: Int32[Array]  # number of tokens whose KV exists, or will exist after the open step
    max_total: Int32[Array]  # number of known tokens at which the length limit applies; NEVER for a free row
    num_blocks: Int32[Array]  # number of held blocks
    next_media: Int32[Array]  # start of the first embedding run that is not computed yet, or NEVER
    release_at: Int32[Array]  # number of computed tokens at which encoder outputs may be released, or NEVER
    num_filled: Int32[Array]  # number of full blocks whose content is recorded
    scheduled: Int32[Array]  # number of tokens in the open step
    scheduled_drafts: Int32[Array]  # number of drafts at the end of the `scheduled` tokens
    num_drafts: Int32[Array]  # number of drafts after the known tokens, for the next step
    drafter: Int32[Array]  # the number of the drafter that made the `num_drafts` drafts
    plain_from: Int32[Array]  # blocks from this token on have no extra digest (media, salt, adapter)
    content: Int64[Array]  # content id of the last full block, which is the parent of the next block
    ended: Int8[Array]


@never_assigned
class FlightColumns(Generic[Array]):
    """Columns for overlapping steps (max_in_flight 2). Otherwise, `in_flight` and `num_pending` are 0."""

    in_flight: Int32[Array]  # number of dispatched steps that contain the row
    num_pending: Int32[Array]  # number of tokens that the row will get from these steps
    # If a row has at least this many known and pending tokens, the row waits for the steps in flight. With 0,
    # the row waits for each step. The number is negated for a row with a grammar, so that the sign marks the
    # row.
    runs_ahead_to: Int32[Array]


@never_assigned
class StateColumns(Generic[Array]):
    """Columns for models with recurrent states. All values are 0 for other models."""

    state_slot: Int32[Array]  # the row's slot, or NO_STATE
    keep_at: Int32[Array]  # number of tokens after which the row's state is cached next, or NEVER
    num_shared: Int32[Array]  # length of the prompt's prefix that was in the prefix cache at admission


@never_assigned
class WideColumns(Generic[Array]):
    """Columns of shape [row, width] and dtype int32."""

    token_ids: Array  # [row, position]: the known tokens, then the drafts
    block_table: Array  # [row, block number in the row]: block ids; 0 for a block that the row does not hold


class Columns(RowColumns[Array], FlightColumns[Array], StateColumns[Array], WideColumns[Array]):
    """All columns of the running batch."""


def _dtypes(columns: type) -> dict[str, type[np.signedinteger]]:
    hints = get_type_hints(columns, include_extras=True)
    return {name: hint.__metadata__[0] for name, hint in hints.items()}


ROW_COLUMNS, FLIGHT_COLUMNS = _dtypes(RowColumns), _dtypes(FlightColumns)
COLUMNS = {**ROW_COLUMNS, **FLIGHT_COLUMNS}  # dtypes by name
STATE_COLUMNS = _dtypes(StateColumns)
WIDE_COLUMNS = tuple(get_type_hints(WideColumns))


def frozen(array: np.ndarray) -> np.ndarray:
    """Make the array read-only and return it."""
    array.flags.writeable = False
    return array


def make_columns(rows: int, num_tokens: int, num_blocks: int) -> dict[str, np.ndarray]:
    """Return all columns by name, filled with zeros. The arguments are the columns' sizes."""
    columns = {name: np.zeros(rows, dtype) for name, dtype in {**COLUMNS, **STATE_COLUMNS}.items()}
    return {
        **columns,
        "token_ids": _wide_column(rows, num_tokens),
        "block_table": _wide_column(rows, num_blocks),
    }


def _wide_column(rows: int, width: int) -> np.ndarray:
    """Return zeros, int32 [rows, width]. The row stride is an odd number of cache lines. With a power of two,
    rows would evict each other from the CPU cache.
    """
    lines = -(-width // 16) | 1
    return np.zeros((rows, lines * 16), np.int32)[:, :width]
