"""The interface between the engine and the executor of its steps: a device, a simulation, or a replayed
log.
"""

import hashlib
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import msgspec
import numpy as np

from mmengine.request import Pooling, Request

# Values in place of a token id:
PENDING = -1  # in `input_ids`: the token that the row samples in the previous step, which may still run
ERROR_TOKEN = -1  # among sampled tokens: the row's logits are not finite
NO_DRAFT = -1  # among drafts: the row has no draft at this position
CUT = "cut"  # a kind of stop: a stop string ended the text before its grammar was complete
REPETITION = "repetition"  # a kind of stop: the text repeated itself
REPETITION_CLOSED = "repetition_closed"  # a kind of stop: then tokens completed the text's grammar
PADDING = -1  # pads an array that is longer than a row's ids, and is the placeholder for a draft


@dataclass(frozen=True, slots=True)
class Admission:
    """A request that gets `row` in this step, with all its known tokens (prompt and outputs so far)."""

    row: int
    request: Request
    token_ids: np.ndarray  # int32 [num_tokens]


@dataclass(frozen=True, slots=True)
class EncodeItem:
    """Encoder work: compute the features for item `index` in the request's media. `key`: the item's key in
    the encoder cache.
    """

    key: bytes
    request: Request
    index: int


@dataclass(frozen=True, slots=True)
class EncodePart:
    """A part of an item's encoder work: the work from `start` to `until`, of `work` in all, in the
    units of encoder_cache/work.py.

    For the last part (`until` is `work`) the item is also the last entry of the plan's `encode`. A part with
    `start` 0 begins the item again. Any other part continues after the last part with the same key, unless
    the key was dropped since.
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
    """The features [item_start, item_start + length) of `key` are the input embeddings of the tokens [start,
    start + length) of the batch.
    """

    key: bytes
    start: int
    item_start: int
    length: int


class StatePlan(msgspec.Struct, frozen=True, eq=False):
    """A step's work on recurrent states, for the n rows of its plan. Before the step, a row's state covers
    its first `num_computed` tokens, without drafts that are not known to be accepted.
    """

    slots: np.ndarray  # int32 [n], the slot of each row's state
    # int32 [m, 2], (source, destination) for each admitted row, in order. Before the forward pass the source
    # slot is copied to the destination slot; if the source is NO_STATE, the destination is set to zero.
    begins: np.ndarray
    # int32 [k, 3], (index among the rows, number of tokens, slot). The row's state after so many tokens is
    # also written to the slot. These tokens are no drafts.
    kept: np.ndarray


class WindowPlan(NamedTuple):
    """Where a step's KV is in a block group with a window, for the n rows and t tokens of its plan.

    `slot_mapping`, `block_table`: as in StepPlan. Entries before the first block that a query of the row
    reads are arbitrary.
    """

    slot_mapping: np.ndarray  # int64 [t]
    block_table: np.ndarray  # int32 [n, b]


class StepPlan(msgspec.Struct, frozen=True, eq=False):
    """A step for an executor, with n scheduled rows, t = num_scheduled.sum() tokens and s rows that sample.

    The arrays belong to the executor: no other code writes to them after the dispatch. The exception is
    `block_table`, which is valid until the step is collected.
    """

    step: int
    rows: np.ndarray  # int32 [n], the row of each request, in scheduling order
    num_scheduled: np.ndarray  # int32 [n], query tokens of each row
    num_computed: np.ndarray  # int32 [n], tokens whose KV exists before this step
    input_ids: np.ndarray  # int32 [t], one row after the other; only a row's last token may be PENDING
    token_index: np.ndarray  # int32 [t], position of each token in its request
    slot_mapping: np.ndarray  # int64 [t], block * block_size + offset
    block_table: np.ndarray  # int32 [n, b], b = blocks of the longest row; 0 past a row's end
    sample: np.ndarray  # int32 [s], ascending indices of the rows (among n) that sample
    admitted: tuple[Admission, ...] = ()
    evict: tuple[bytes, ...] = ()  # encoder keys to drop, before encoding
    encode: tuple[EncodeItem, ...] = ()
    media: tuple[MediaSpan, ...] = ()
    # Copies of KV blocks before the forward pass, in this order, int32 [m, 2] (source, destination):
    swap_out: np.ndarray | None = None  # device to host
    copy: np.ndarray | None = None  # device to device
    swap_in: np.ndarray | None = None  # host to device
    num_drafts: np.ndarray | None = (
        None  # int32 [n], how many of a row's last tokens are drafts; None: no drafts
    )
    # int32 [d, n], how many drafts each drafter may propose for each row. Drafters from number d on have the
    # limits of the last row of the array. The shape [0, 0] means no drafts; None means no limit.
    draft_room: np.ndarray | None = None
    # (request id, int32 block ids) for blocks that were fetched from a store. They are copied to the device
    # before all other copies.
    fetched: tuple[tuple[str, np.ndarray], ...] = ()
    # A part of an item that is encoded over several steps. A step with a part may have no rows.
    part: EncodePart | None = None
    states: StatePlan | None = None  # for models with recurrent states
    # digests of the adapters that rows may use; all other adapters may be unloaded
    adapters: tuple[bytes, ...] = ()
    # (index among the n rows, what is pooled) for pooled requests whose last prompt token is in the step
    pool: tuple[tuple[int, Pooling], ...] = ()
    # For each block group with a window. `slot_mapping` and `block_table` above are those of the first group.
    windows: tuple[WindowPlan, ...] = ()


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
    """Return how many drafts each row that samples may have, int32 [s], or None for no limit. `drafters`: the
    number of each such row's drafter, int [s].
    """
    room = plan.draft_room
    if room is None:
        return None
    if not len(room):
        return np.zeros(len(drafters), np.int32)
    return room[np.minimum(drafters, len(room) - 1), plan.sample]


class PromptLogprobs(NamedTuple):
    """The logprobs of one prompt's n tokens. For each position, the prompt token comes first, then the k
    likeliest tokens, the best first. The first prompt token has an id but no logprobs, because no token
    precedes it. `row`: an index into the rows that sampled.
    """

    row: int
    token_ids: np.ndarray  # int32 [n, 1 + k]
    logprobs: np.ndarray  # float32 [n, 1 + k]


class PooledVector(NamedTuple):
    """The result of a pooled request. `row`: its row. `digest`: SHA-256 of the vector's bytes, or b"" if the
    vector is not finite.
    """

    row: int
    digest: bytes
    vector: np.ndarray  # float32 [d]; empty if a replayed log does not contain the vector

    @classmethod
    def of(cls, row: int, vector: np.ndarray) -> "PooledVector":
        """Return the entry for a computed vector, float32 [d]."""
        digest = hashlib.sha256(vector.tobytes()).digest() if np.isfinite(vector).all() else b""
        return cls(row, digest, vector)


class StepResult(msgspec.Struct, eq=False):
    """A step's result. An index in `stops`, `errors` and `logprobs` is an index into `plan.sample`. These
    lists have entries only for some rows, in ascending order.

    `stops`: (index, kind) for each row whose text ended; kind is "eos", "token", "string", "grammar",
    "closed", CUT, REPETITION or REPETITION_CLOSED. `errors`: (index, text) for each row that failed alone,
    for example with NaN logits.
    `logprobs`: (index, [(token id, logprob), …]) with the chosen token first; a row that gave several tokens
    may have as many entries, in order.

    With drafts a row gives `counts` tokens: its accepted drafts and one more. `token_ids` then holds the
    rows' tokens, one row after the other. `drafts`: the drafts for the next step.
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
    host_ns: int = 0  # time that this process spent since the previous step returned; 0: unknown
    prompt_logprobs: tuple[PromptLogprobs, ...] = ()  # of prompts that ended in this step
    pooled: tuple[PooledVector, ...] = ()  # one for each row in `plan.pool`


class Executor(Protocol):
    """Computes steps in dispatch order. Up to max_in_flight steps are dispatched at a time."""

    @property
    def needs_plan(self) -> bool:
        """Whether `dispatch` needs a plan. If False, the engine builds no plans and passes NO_PLAN."""

    def dispatch(self, plan: StepPlan) -> None:
        """Begin one step. Returns at once if the device is asynchronous. If the call raises, the step was not
        begun.
        """

    def collect(self) -> StepResult:
        """Wait for the oldest dispatched step and return its result. Raises ExecutorLost if every later step
        would fail too, and any other error if this step failed as a whole."""

    def discard(self) -> None:
        """Forget all dispatched steps, because one step failed. Never raises."""

    def close(self) -> None:
        """Free the device."""
