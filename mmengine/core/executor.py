"""The interface between the engine's loop and its executor: plans, results and the protocol.

An executor is a device, a simulation, or a log that is replayed.
"""

import hashlib
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import msgspec
import numpy as np

from mmengine.request import Pooling, Request

# Special values in arrays, and kinds of stop:
PENDING = -1  # in `input_ids`: the token that the previous step samples
ERROR_TOKEN = -1  # in a result's `token_ids`: the row's logits are not finite
NO_DRAFT = -1  # in an array of drafts: the row has no draft at this position
CUT = "cut"  # kind of stop: a stop string ended the text before the text satisfied its grammar
REPETITION = "repetition"  # kind of stop: the text repeated itself
# Kind of stop: the text repeated itself, and the engine then completed the text as its grammar requires.
REPETITION_CLOSED = "repetition_closed"
PADDING = -1  # fills arrays of ids after a row's last id, and marks the place for a draft


@dataclass(frozen=True, slots=True)
class Admission:
    """A request that gets `row` in this step. `token_ids`: the prompt and the outputs so far."""

    row: int
    request: Request
    token_ids: np.ndarray  # int32 [num_tokens]


@dataclass(frozen=True, slots=True)
class EncodeItem:
    """Encoder work: compute the encoder output for the request's media item `index`. `key`: the item's
    key in the encoder cache.
    """

    key: bytes
    request: Request
    index: int


@dataclass(frozen=True, slots=True)
class EncodePart:
    """A part of an item's encoder work, for a large item that is encoded over several steps.

    The part covers the work from `start` to `until`. `work` is the whole item's work, in the units of
    encoder_cache/work.py. In the step with the last part, the item is also the last entry of the plan's
    `encode`. A part with `start` > 0 continues after the previous part with the same key, if the key was not
    dropped meanwhile.
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
    """Maps encoder output to input embeddings. The batch's tokens [start, start + length) get the features
    [item_start, item_start + length) of the encoder output `key`.
    """

    key: bytes
    start: int
    item_start: int
    length: int


class StatePlan(msgspec.Struct, frozen=True, eq=False):
    """The recurrent states that a step reads, copies and stores, for the n rows in its plan.

    Before the step, a row's state covers the row's first `num_computed` tokens. A state never covers a draft
    before its acceptance is known.
    """

    slots: np.ndarray  # int32 [n], the slot of each row's state
    # int32 [m, 2], (source slot, destination slot) for each admitted row. The states are copied in this order
    # before the forward pass. If the source is -1 (NO_STATE), the destination is set to zero.
    begins: np.ndarray
    # int32 [k, 3], (index among the rows, token count, slot). The row's state after this many tokens is
    # copied to the slot. The count includes no drafts.
    kept: np.ndarray


class WindowPlan(NamedTuple):
    """A step's KV slots in a block group with a window, for the n rows and t tokens in the step's plan.

    `slot_mapping`, `block_table`: as in StepPlan. A query sees only the tokens in its window. Table entries
    before the first query's window have arbitrary values.
    """

    slot_mapping: np.ndarray  # int64 [t]
    block_table: np.ndarray  # int32 [n, b]


class StepPlan(msgspec.Struct, frozen=True, eq=False):
    """A step for an executor, with n scheduled rows, t = num_scheduled.sum() tokens and s rows that sample.

    After the step is collected, `block_table` may change. All other arrays never change after the dispatch.
    """

    step: int
    rows: np.ndarray  # int32 [n], the row of each request, in scheduling order
    num_scheduled: np.ndarray  # int32 [n], query tokens of each row
    num_computed: np.ndarray  # int32 [n], tokens whose KV exists before this step
    input_ids: np.ndarray  # int32 [t], the rows' tokens, row by row; only a row's last token may be PENDING
    token_index: np.ndarray  # int32 [t], position of each token in its request
    slot_mapping: np.ndarray  # int64 [t], block * block_size + offset
    # int32 [n, b], b = number of blocks of the longest row. Entries past a row's end are 0. If all layers
    # have a window, entries before the window have arbitrary values.
    block_table: np.ndarray
    sample: np.ndarray  # int32 [s], the rows that sample, as ascending indices among the n rows
    admitted: tuple[Admission, ...] = ()
    evict: tuple[bytes, ...] = ()  # encoder keys to drop, before encoding
    encode: tuple[EncodeItem, ...] = ()
    media: tuple[MediaSpan, ...] = ()
    # Copies of KV blocks before the forward pass, in this order, int32 [m, 2] (source, destination):
    swap_out: np.ndarray | None = None  # device to host
    copy: np.ndarray | None = None  # device to device
    swap_in: np.ndarray | None = None  # host to device
    # int32 [n], number of drafts at the end of each row's tokens; None: no drafts
    num_drafts: np.ndarray | None = None
    # int32 [d, n], the maximum number of drafts for each drafter and row. A drafter with a number above d - 1
    # has the limits of drafter d - 1. Shape [0, 0]: no drafts; None: no limit.
    draft_room: np.ndarray | None = None
    # (request id, int32 block ids) for blocks that were fetched from a block store. They are copied to the
    # device before all other copies.
    fetched: tuple[tuple[str, np.ndarray], ...] = ()
    # Part of an item's encoder work in this step. A step with a part may have no rows.
    part: EncodePart | None = None
    states: StatePlan | None = None  # for models with recurrent states
    # Digests of the adapters that rows of this step may use. All other adapters may be unloaded.
    adapters: tuple[bytes, ...] = ()
    # (index among the n rows, Pooling) for pooled requests whose last prompt token is in the step
    pool: tuple[tuple[int, Pooling], ...] = ()
    # The KV slots in each block group with a window. `slot_mapping` and `block_table` above belong to the
    # first block group.
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
    """Return the maximum number of drafts for each row that samples, int32 [s], or None for no limit.

    `drafters`: the drafter number of each row that samples, int [s].
    """
    room = plan.draft_room
    if room is None:
        return None
    if not len(room):
        return np.zeros(len(drafters), np.int32)
    return room[np.minimum(drafters, len(room) - 1), plan.sample]


class PromptLogprobs(NamedTuple):
    """The logprobs of one prompt's n tokens.

    Each position has 1 + k entries: the prompt token, then the k likeliest tokens in descending order. The
    first position has NaN as logprobs. `row`: an index among the rows that sampled.
    """

    row: int
    token_ids: np.ndarray  # int32 [n, 1 + k]
    logprobs: np.ndarray  # float32 [n, 1 + k]


class PooledVector(NamedTuple):
    """A pooled request's vector. `row`: the request's row. `digest`: SHA-256 of the vector's bytes, or
    b"" if the vector is not finite.
    """

    row: int
    digest: bytes
    vector: np.ndarray  # float32 [d]; empty if a replayed log has only the digest

    @classmethod
    def of(cls, row: int, vector: np.ndarray) -> "PooledVector":
        """Return the PooledVector of a computed vector, float32 [d], with its digest."""
        digest = hashlib.sha256(vector.tobytes()).digest() if np.isfinite(vector).all() else b""
        return cls(row, digest, vector)


class StepResult(msgspec.Struct, eq=False):
    """A step's result.

    `stops`, `errors` and `logprobs` have entries only for some rows. An entry's index is an index into
    `plan.sample`; the indices ascend.

    `stops`: (index, kind) for each row whose text ended; kind is "eos", "token", "string", "grammar",
    "closed" (completed at the token limit), CUT, REPETITION or REPETITION_CLOSED.

    `errors`: (index, text) for each row that failed although the step succeeded, for example with NaN logits.

    `logprobs`: (index, [(token id, logprob), …]) with the chosen token first. If a confidence was computed,
    its pairs follow the logprobs (token_confidence.py). A row with several tokens may have an entry for each
    token.

    In a step with drafts, `counts` is each row's number of returned tokens: the accepted drafts and the token
    after them. `token_ids` then contains the tokens row by row. `drafts`: the drafts for the next step.
    """

    token_ids: np.ndarray  # int32 [s], or [counts.sum()]
    stops: tuple[tuple[int, str], ...] = ()
    errors: tuple[tuple[int, str], ...] = ()
    logprobs: tuple[tuple[int, list[tuple[int, float]]], ...] = ()
    device_ns: int = 0
    counts: np.ndarray | None = None  # int32 [s]; None: each row returns one token
    drafts: np.ndarray | None = None  # int32 [num_drafts.sum()]
    num_drafts: np.ndarray | None = None  # int32 [s]; None: no drafts
    drafters: np.ndarray | None = None  # int32 [s], number of the drafter of each row; None: drafter 0
    draft_ns: int = 0  # time for proposing the drafts, included in `device_ns`
    host_ns: int = 0  # this process's time between the previous step and this step; 0: unknown
    prompt_logprobs: tuple[PromptLogprobs, ...] = ()  # for prompts that ended in this step
    pooled: tuple[PooledVector, ...] = ()  # one vector for each row in `plan.pool`


class Executor(Protocol):
    """Computes steps in dispatch order. At most max_in_flight steps are in flight at a time."""

    @property
    def needs_plan(self) -> bool:
        """Whether `dispatch` needs plans. If False, the engine passes NO_PLAN."""

    def dispatch(self, plan: StepPlan) -> None:
        """Begin a step. If the device is asynchronous, return before the step has ended.

        After an error the step has not begun.
        """

    def collect(self) -> StepResult:
        """Wait for the oldest dispatched step and return its result. Raises ExecutorLost if no later step can
        run, and another error if only this step failed.
        """

    def discard(self) -> None:
        """Forget all dispatched steps, because a step failed. Never raises an error."""

    def close(self) -> None:
        """Free the device."""
