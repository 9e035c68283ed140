"""The port between the engine and whatever computes a step: a device, a simulation, or a log."""

from dataclasses import dataclass
from typing import NamedTuple, Protocol

import msgspec
import numpy as np

from mmengine.request import Request

# What stands where a token id is expected and none is.
PENDING = -1  # in `input_ids`: the token that this row sampled last, in a step that may still run
ERROR_TOKEN = -1  # among sampled ones: the row has no finite distribution
NO_DRAFT = -1  # among drafts: this row has none there
CUT = "cut"  # among stops: a stop string ended a form that is not complete before it
PADDING = -1  # where a column is longer than what a row has: behind its ids, or where a draft would stand


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
    """Of the features of an item those between `start` and `until` of all the `work` that it takes; the last
    one (`until` is `work`) stands at the end of the plan's `encode`, too. From 0 on it begins anew; else it
    goes on behind the part of the step before, of the same key, unless that key was dropped since."""

    item: EncodeItem
    start: int
    until: int
    work: int

    @property
    def is_last(self) -> bool:
        return self.until >= self.work


@dataclass(frozen=True, slots=True)
class MediaSpan:
    """Features [item_start, item_start + length) of `key` belong at tokens [start, start + length)
    of the batch."""

    key: bytes
    start: int
    item_start: int
    length: int


class StatePlan(msgspec.Struct, frozen=True, eq=False):
    """What a step does to recurrent states, for the n rows of its plan. A row's state stands behind its
    `num_computed` tokens, or behind as many as were sure before: drafts are not."""

    slots: np.ndarray  # int32 [n], where each row's state is
    # int32 [m, 2]: before the forward, in this order, the first is copied to the second, or where it is
    # NO_STATE the second is set to zero: those of the rows that were admitted.
    begins: np.ndarray
    # int32 [k, 3]: place among the rows, tokens, slot: the state of the row behind so many of its tokens
    # is written to that slot, too. Not more than are sure after the step.
    kept: np.ndarray


class StepPlan(msgspec.Struct, frozen=True, eq=False):
    """One step, for an executor. n scheduled rows, t = num_scheduled.sum() tokens, s sampling rows.

    The arrays are the executor's own: nothing else writes them after dispatch, but for `block_table`, which
    is good until the step is collected.
    """

    step: int
    rows: np.ndarray  # int32 [n], the row of each request, in scheduling order
    num_scheduled: np.ndarray  # int32 [n], query tokens of each row
    num_computed: np.ndarray  # int32 [n], tokens whose KV is there before this step
    input_ids: np.ndarray  # int32 [t], rows one after the other; PENDING at most once a row, at its end
    token_index: np.ndarray  # int32 [t], place of each token in its request
    slot_mapping: np.ndarray  # int64 [t], block * block_size + offset
    block_table: np.ndarray  # int32 [n, b], b = blocks of the longest row; past a row's end: 0
    sample: np.ndarray  # int32 [s], ascending indices into the n rows whose last token samples
    admitted: tuple[Admission, ...] = ()
    evict: tuple[bytes, ...] = ()  # encoder keys to drop, before encoding
    encode: tuple[EncodeItem, ...] = ()
    media: tuple[MediaSpan, ...] = ()
    # Copies of KV blocks, int32 [m, 2] (source, destination), done in this order before the forward:
    swap_out: np.ndarray | None = None  # device to host
    copy: np.ndarray | None = None  # device to device
    swap_in: np.ndarray | None = None  # host to device
    num_drafts: np.ndarray | None = None  # int32 [n], tokens at a row's end that are drafts; None: none
    # int32 [d, n], the most drafts to propose for each row by number of the drafter (beyond d: as the last;
    # [0, 0]: nobody for anybody); None: as many as they like.
    draft_room: np.ndarray | None = None
    # Blocks that came of a store, for a request: the next of those that it was sent for (int32). They are
    # copied to the device before all else.
    fetched: tuple[tuple[str, np.ndarray], ...] = ()
    part: EncodePart | None = None  # of an item that is encoded over several steps; then there may be no rows
    states: StatePlan | None = None  # where rows have recurrent states
    adapters: tuple[bytes, ...] = ()  # digests of those that rows may compute with; all others may go


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
    """Of each row that samples: how many drafts it may have of the drafter with that number. None: as many as
    there are."""
    room = plan.draft_room
    if room is None:
        return None
    if not len(room):
        return np.zeros(len(drafters), np.int32)
    return room[np.minimum(drafters, len(room) - 1), plan.sample]


class PromptLogprobs(NamedTuple):
    """Of the tokens of one prompt: row by row the token that stands there, then the likeliest ones, best
    first; of the first token only its id, for nothing stands before it. `row`: an index into the rows that
    sampled."""

    row: int
    token_ids: np.ndarray  # int32 [n, 1 + k]
    logprobs: np.ndarray  # float32 [n, 1 + k]


class StepResult(msgspec.Struct, eq=False):
    """What a step gave. Indices point into `plan.sample`; lists are sparse and ascending.

    `stops`: (index, kind) where the text ended, kind is "eos", "token", "string", "grammar", "closed",
    or CUT.
    `errors`: (index, what) where a row failed alone, for example with NaN logits.
    `logprobs`: (index, [(token id, logprob), …]); the chosen token comes first. Of a row that gave several
    tokens there may be as many, in order.

    With drafts a row gives several tokens: `counts` of them, the accepted drafts and one more;
    `token_ids` then holds the rows' tokens one after the other. `drafts` are for the next step.
    """

    token_ids: np.ndarray  # int32 [s], or [counts.sum()]
    stops: tuple[tuple[int, str], ...] = ()
    errors: tuple[tuple[int, str], ...] = ()
    logprobs: tuple[tuple[int, list[tuple[int, float]]], ...] = ()
    device_ns: int = 0
    counts: np.ndarray | None = None  # int32 [s]; None: one token each
    drafts: np.ndarray | None = None  # int32 [num_drafts.sum()]
    num_drafts: np.ndarray | None = None  # int32 [s]; None: no drafts
    drafters: np.ndarray | None = None  # int32 [s], who made them, by number; None: drafter 0
    draft_ns: int = 0  # of `device_ns`, what making the drafts took
    host_ns: int = 0  # what this process did since the step before was back, where that is known
    prompt_logprobs: tuple[PromptLogprobs, ...] = ()  # of prompts that ended in this step


class Executor(Protocol):
    """Takes up to max_in_flight steps, and computes them in the order in which they came."""

    @property
    def needs_plan(self) -> bool:
        """False: `dispatch` does not look at its plan, and is given NO_PLAN."""

    def dispatch(self, plan: StepPlan) -> None:
        """Take one step. Returns at once where the device allows it. When it raises, it has not."""

    def collect(self) -> StepResult:
        """Wait for the oldest dispatched step. Raises whatever went wrong with the whole step; ExecutorLost
        when that holds for every later one."""

    def discard(self) -> None:
        """Forget all dispatched steps: one of them failed. Never raises."""

    def close(self) -> None:
        """Free the device."""
