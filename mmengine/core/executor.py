"""The port between the engine and its steps' executor: a device, a simulation, or a log."""

from dataclasses import dataclass
from typing import NamedTuple, Protocol

import msgspec
import numpy as np

from mmengine.request import Request

# Values in place of a token id:
PENDING = -1  # in `input_ids`: the token that this row sampled last, in a step that may still run
ERROR_TOKEN = -1  # among sampled tokens: the row has no finite distribution
NO_DRAFT = -1  # among drafts: this row has no draft in this place
CUT = "cut"  # among stops: a stop string ended the text before its grammar was complete
PADDING = -1  # fills a column that is longer than a row's ids, and stands in place of a draft


@dataclass(frozen=True, slots=True)
class Admission:
    """A request that got `row` in this step, with all its known tokens (prompt and outputs so far)."""

    row: int
    request: Request
    token_ids: np.ndarray  # int32 [num_tokens]


@dataclass(frozen=True, slots=True)
class EncodeItem:
    """Encoder work: compute the features of `key`, which is item `index` of `request`'s media."""

    key: bytes
    request: Request
    index: int


@dataclass(frozen=True, slots=True)
class EncodePart:
    """The features of an item between `start` and `until`, of all the `work` that the item takes.

    The last part (`until` is `work`) also stands at the end of the plan's `encode`. A part from 0 on begins
    anew. Any other part continues after the previous step's part with the same key, unless that key was
    dropped since.
    """

    item: EncodeItem
    start: int
    until: int
    work: int

    @property
    def is_last(self) -> bool:
        return self.until >= self.work


@dataclass(frozen=True, slots=True)
class MediaSpan:
    """Features [item_start, item_start + length) of `key` belong at tokens [start, start + length) of the
    batch.
    """

    key: bytes
    start: int
    item_start: int
    length: int


class StatePlan(msgspec.Struct, frozen=True, eq=False):
    """A step's work on recurrent states, for its plan's n rows. A row's state covers its first
    `num_computed` tokens, or as many as were certain before the step: drafts are not certain.
    """

    slots: np.ndarray  # int32 [n], the slot of each row's state
    # int32 [m, 2], for the admitted rows, in order and before the forward: the first slot is copied to the
    # second, or the second is set to zero if the first is NO_STATE.
    begins: np.ndarray
    # int32 [k, 3]: place among the rows, tokens, slot. The row's state after so many tokens is also written
    # to that slot. The tokens are certain after the step.
    kept: np.ndarray


class StepPlan(msgspec.Struct, frozen=True, eq=False):
    """One step, for an executor: n scheduled rows, t = num_scheduled.sum() tokens, s sampling rows.

    The arrays belong to the executor: no other code writes to them after dispatch. The exception is
    `block_table`, which is valid until the step is collected.
    """

    step: int
    rows: np.ndarray  # int32 [n], the row of each request, in scheduling order
    num_scheduled: np.ndarray  # int32 [n], query tokens of each row
    num_computed: np.ndarray  # int32 [n], tokens whose KV exists before this step
    input_ids: np.ndarray  # int32 [t], one row after the other; PENDING at most once a row, at its end
    token_index: np.ndarray  # int32 [t], place of each token in its request
    slot_mapping: np.ndarray  # int64 [t], block * block_size + offset
    block_table: np.ndarray  # int32 [n, b], b = blocks of the longest row; 0 past a row's end
    sample: np.ndarray  # int32 [s], ascending indices into the n rows whose last token samples
    admitted: tuple[Admission, ...] = ()
    evict: tuple[bytes, ...] = ()  # encoder keys to drop, before encoding
    encode: tuple[EncodeItem, ...] = ()
    media: tuple[MediaSpan, ...] = ()
    # Copies of KV blocks, int32 [m, 2] (source, destination), in this order before the forward:
    swap_out: np.ndarray | None = None  # device to host
    copy: np.ndarray | None = None  # device to device
    swap_in: np.ndarray | None = None  # host to device
    num_drafts: np.ndarray | None = None  # int32 [n], tokens at a row's end that are drafts; None: no drafts
    # int32 [d, n], the largest number of drafts to propose for each row, by the drafter's number (beyond d:
    # as the last; [0, 0]: no drafts); None: no limit.
    draft_room: np.ndarray | None = None
    # Blocks from a store, int32, with their request: the next blocks that were fetched for the request. They
    # are copied to the device before all other copies.
    fetched: tuple[tuple[str, np.ndarray], ...] = ()
    # of an item that is encoded over several steps; the step may have no rows then
    part: EncodePart | None = None
    states: StatePlan | None = None  # for models with recurrent states
    # digests of the adapters that rows may compute with; all others may be unloaded
    adapters: tuple[bytes, ...] = ()


_NONE = np.zeros(0, np.int32)
NO_PLAN = StepPlan(
    step=0,
    rows=_NONE,
    num_scheduled=_NONE,
    num_computed=_NONE,
    input_ids=_NONE,
    token_index=_NONE,
    slot_mapping=np.zeros(0, np.int64),
    block_table=np.zeros((0, 0), np.int32),
    sample=_NONE,
)


def room_of(plan: StepPlan, drafters: np.ndarray) -> np.ndarray | None:
    """Return how many drafts each sampling row may have from the drafter with its number. None: no limit."""
    room = plan.draft_room
    if room is None:
        return None
    if not len(room):
        return np.zeros(len(drafters), np.int32)
    return room[np.minimum(drafters, len(room) - 1), plan.sample]


class PromptLogprobs(NamedTuple):
    """Logprobs of one prompt's tokens. Each row has the prompt token first, then the likeliest tokens, best
    first. The first token has only its id, because no token precedes it. `row`: an index into the rows that
    sampled.
    """

    row: int
    token_ids: np.ndarray  # int32 [n, 1 + k]
    logprobs: np.ndarray  # float32 [n, 1 + k]


class StepResult(msgspec.Struct, eq=False):
    """A step's result. Indices point into `plan.sample`; lists are sparse and ascending.

    `stops`: (index, kind) where the text ended; kind is "eos", "token", "string", "grammar", "closed", or
    CUT. `errors`: (index, text) where a row failed alone, for example with NaN logits. `logprobs`: (index,
    [(token id, logprob), …]) with the chosen token first; a row that gave several tokens may have as many
    entries, in order.

    With drafts a row gives several tokens: `counts` of them, the accepted drafts and one more. `token_ids`
    then holds the rows' tokens, one row after the other. `drafts` are for the next step.
    """

    token_ids: np.ndarray  # int32 [s], or [counts.sum()]
    stops: tuple[tuple[int, str], ...] = ()
    errors: tuple[tuple[int, str], ...] = ()
    logprobs: tuple[tuple[int, list[tuple[int, float]]], ...] = ()
    device_ns: int = 0
    counts: np.ndarray | None = None  # int32 [s]; None: one token each
    drafts: np.ndarray | None = None  # int32 [num_drafts.sum()]
    num_drafts: np.ndarray | None = None  # int32 [s]; None: no drafts
    drafters: np.ndarray | None = None  # int32 [s], the drafter's number; None: drafter 0
    draft_ns: int = 0  # the part of `device_ns` that making the drafts took
    host_ns: int = 0  # time of this process since the step before was back, if known
    prompt_logprobs: tuple[PromptLogprobs, ...] = ()  # of prompts that ended in this step


class Executor(Protocol):
    """Takes up to max_in_flight steps, and computes them in their dispatch's order."""

    @property
    def needs_plan(self) -> bool:
        """False: `dispatch` ignores its plan and gets NO_PLAN."""

    def dispatch(self, plan: StepPlan) -> None:
        """Take one step. Returns at once if the device is asynchronous. A call that raises has not taken the
        step.
        """

    def collect(self) -> StepResult:
        """Wait for the oldest dispatched step and return its result. Raises any error that concerns the
        whole step, and ExecutorLost if every later step would fail too."""

    def discard(self) -> None:
        """Forget all dispatched steps, because one of them failed. Never raises."""

    def close(self) -> None:
        """Free the device."""
