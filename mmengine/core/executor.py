"""The interface between the engine's loop and its executor: plans, results and the protocol.

An executor is a device, a simulation, or a log that is replayed.
"""

import hashlib
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import msgspec
import numpy as np

from mmengine.request import Pooling, Request

# Special values of token ids, drafts and kinds of stop:
PENDING = -1  # in `input_ids`: the previous step, which may still run, samples this token
ERROR_TOKEN = -1  # in a result's `token_ids`: the row's logits are not finite
NO_DRAFT = -1  # in an array of drafts: the row has no draft at this position
CUT = "cut"  # a kind of stop: a stop string ended the text before its grammar was complete
REPETITION = "repetition"  # a kind of stop: the text repeated itself
# A kind of stop: the text repeated itself, and further tokens then completed it by its grammar.
REPETITION_CLOSED = "repetition_closed"
PADDING = -1  # fills the end of an array that is longer than a row's ids; also the placeholder for a draft


@dataclass(frozen=True, slots=True)
class Admission:
    """A request that gets `row` in this step, with all its known tokens (prompt and outputs so far)."""

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

    The part covers the work from `start` to `until`. `work` is the whole item's work. All three are counted
    in the units of encoder_cache/work.py. In the step with the last part (`until` equals `work`) the plan's
    `encode` also contains the item, as its last entry. A part with `start` 0 encodes the item from the
    beginning. Any other part continues after the previous part with the same key, if the key was not dropped
    meanwhile.
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
    """Maps encoder output to input embeddings: the tokens [start, start + length) of the batch take the
    features [item_start, item_start + length) of `key`.
    """

    key: bytes
    start: int
    item_start: int
    length: int


class StatePlan(msgspec.Struct, frozen=True, eq=False):
    """The recurrent states that a step reads, copies and keeps, for the n rows in its plan.

    Before the step, a row's state covers the row's first `num_computed` tokens. Drafts are covered only if
    they are known to be accepted.
    """

    slots: np.ndarray  # int32 [n], the slot of each row's state
    # int32 [m, 2], (source slot, destination slot) for each admitted row, in order. Before the forward pass
    # the source is copied to the destination. If the source is NO_STATE, the destination is set to zero.
    begins: np.ndarray
    # int32 [k, 3], (index among the rows, number of tokens, slot). After the row's first `number of tokens`
    # tokens, the row's state is also written to the slot. None of these tokens is a draft.
    kept: np.ndarray


class WindowPlan(NamedTuple):
    """A step's KV slots in a block group with a window, for the n rows and t tokens in the step's plan.

    `slot_mapping`, `block_table`: as in StepPlan. A query sees only the tokens in its window. Table entries
    before the first block that a row's queries read have arbitrary values.
    """

    slot_mapping: np.ndarray  # int64 [t]
    block_table: np.ndarray  # int32 [n, b]


class StepPlan(msgspec.Struct, frozen=True, eq=False):
    """A step for an executor, with n scheduled rows, t = num_scheduled.sum() tokens and s rows that sample.

    The arrays belong to the executor: no other code writes to them after the dispatch. The exception is
    `block_table`, which is valid only until the step is collected.
    """

    step: int
    rows: np.ndarray  # int32 [n], the row of each request, in scheduling order
    num_scheduled: np.ndarray  # int32 [n], query tokens of each row
    num_computed: np.ndarray  # int32 [n], tokens whose KV exists before this step
    input_ids: np.ndarray  # int32 [t], the rows' tokens, row by row; only a row's last token may be PENDING
    token_index: np.ndarray  # int32 [t], position of each token in its request
    slot_mapping: np.ndarray  # int64 [t], block * block_size + offset
    block_table: np.ndarray  # int32 [n, b], b = number of blocks of the longest row; 0 past a row's end
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
    # int32 [d, n], the maximum number of drafts that drafter d may propose for each row. Drafters with a
    # higher number have the limits of the last drafter in the array. Shape [0, 0]: no drafts; None: no limit.
    draft_room: np.ndarray | None = None
    # (request id, int32 block ids) for blocks that were fetched from a block store. They are copied to the
    # device before all other copies.
    fetched: tuple[tuple[str, np.ndarray], ...] = ()
    # A part of an item that is encoded over several steps. A step with a part may have no rows.
    part: EncodePart | None = None
    states: StatePlan | None = None  # for models with recurrent states
    # Digests of the adapters that rows of this step may use. All other adapters may be unloaded.
    adapters: tuple[bytes, ...] = ()
    # (index among the n rows, Pooling) for pooled requests whose last prompt token is in the step
    pool: tuple[tuple[int, Pooling], ...] = ()
    # One entry for each block group with a window. `slot_mapping` and `block_table` above are those of the
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

    `drafters`: for each row that samples, the number of its drafter, int [s].
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
    first prompt token has an id but no logprobs, because no token precedes it. `row`: an index among the rows
    that sampled.
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

    `stops`, `errors` and `logprobs` have entries only for some rows, in ascending order. An entry's index is
    an index into `plan.sample`.

    `stops`: (index, kind) for each row whose text ended; kind is "eos", "token", "string", "grammar",
    "closed", CUT, REPETITION or REPETITION_CLOSED. `errors`: (index, text) for each row that failed while the
    others did not, for example with NaN logits.
    `logprobs`: (index, [(token id, logprob), …]) with the chosen token first. If the token's confidence was
    computed, its pairs (token_confidence.py) are last. A row that returned several tokens may have an entry
    for each token, in order.

    In a step with drafts a row returns `counts` tokens: its accepted drafts and one more token. `token_ids`
    then holds the rows' tokens, row by row. `drafts`: the drafts for the next step.
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
    draft_ns: int = 0  # time for proposing the drafts; `device_ns` includes this time
    host_ns: int = 0  # time of this process since the previous step returned; 0: unknown
    prompt_logprobs: tuple[PromptLogprobs, ...] = ()  # for prompts that ended in this step
    pooled: tuple[PooledVector, ...] = ()  # one vector for each row in `plan.pool`


class Executor(Protocol):
    """Computes steps in dispatch order. At most max_in_flight steps are in flight at a time."""

    @property
    def needs_plan(self) -> bool:
        """Whether `dispatch` needs plans. If False, the engine builds no plan and passes NO_PLAN instead."""

    def dispatch(self, plan: StepPlan) -> None:
        """Begin a step. Returns at once if the device is asynchronous. If this method raises an error, the
        step did not begin.
        """

    def collect(self) -> StepResult:
        """Wait for the oldest dispatched step and return its result. Raises ExecutorLost if no later step can
        run. Raises any other error if only this step failed.
        """

    def discard(self) -> None:
        """Forget all dispatched steps, because a step failed. Never raises an error."""

    def close(self) -> None:
        """Free the device."""
