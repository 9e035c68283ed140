"""The events of a run: every change of a request's state, in the order in which it happened.

Observations are facts that only the log knows (arrivals, tokens, failures). Decisions follow from
the state and are derived again by `verify`. Integer columns are little-endian int32 bytes.
Fields are only ever added, at the end and with a default; a type number is never used twice.
"""

from typing import TypeAlias

import msgspec

from mmengine.errors import ErrorCode
from mmengine.events.adapter_events import AdapterLoaded as AdapterLoaded
from mmengine.events.adapter_events import AdapterUnloaded as AdapterUnloaded
from mmengine.events.event_base import EventBase
from mmengine.events.session_events import Appended as Appended
from mmengine.events.session_events import Leased as Leased
from mmengine.events.session_events import LeaseTaken as LeaseTaken
from mmengine.events.session_events import SessionClosed as SessionClosed
from mmengine.events.session_events import SessionOpened as SessionOpened
from mmengine.events.store_events import Arrived as Arrived
from mmengine.events.store_events import Fetched as Fetched
from mmengine.events.store_events import Lost as Lost
from mmengine.events.store_events import Offered as Offered
from mmengine.request import Adapter, GrammarRequest, MediaItem, SamplingParams, ThinkingBudget

SCHEMA_VERSION = 1
NO_SLOT = -1  # in place of a slot: a grammar that the log keeps nowhere
FOR_ALL = -1  # in place of a row: room is made for whoever needs it
AS_CACHED = -1  # in place of a number of tokens: as many as the cached blocks hold
DEADLINE = "deadline"  # the reason of a Cancelled by the request's own deadline
NO_STATE = -1  # in place of a state slot


class FoldConstants(msgspec.Struct, array_like=True, frozen=True):
    """How the fold applies decisions of the scheduler that wrote the log. vLLM's scheduler changes all of
    them.

    `isolates_failures`: requests of a failed step become suspects. `keeps_broken_blocks`: blocks of a row
    whose logits were broken stay prefix hits. `frees_at_once`: a request that ends while its step runs frees
    its blocks at once. `fills_in_row_order`: of equal blocks that one step fills, the first row's block is
    hit. `media_ahead`: how many tokens after a block belong to the block's hash with their media.
    """

    isolates_failures: bool = True
    keeps_broken_blocks: bool = False
    frees_at_once: bool = False
    fills_in_row_order: bool = False
    media_ahead: int = 0


class Started(EventBase, frozen=True):
    """Observation, first record of a log: what a replay needs to know of the engine."""

    schema: int
    engine_version: str
    decision_version: int
    config: dict  # EngineConfig, resolved
    fingerprints: dict[str, str]  # weights, processor, dtype, backend
    num_blocks: int
    constants: FoldConstants = FoldConstants()


class Queued(EventBase, frozen=True):
    """Observation with a decision in it (its place in the queue): a request was accepted.

    `prompt`: int32 token ids. `grammar_slot`: where the log keeps kind and source of `grammar` from here on,
    or, where they are empty, has kept them since before (core/state/grammar_slots.py). `envelope`: what a
    server keeps with the request, such as when it came; no decision reads it. `outputs`: int32 ids of the
    first tokens of the answer, which its consumer has already; the engine gives those behind them.
    """

    request_id: str
    prompt: bytes
    sampling: SamplingParams
    media: tuple[MediaItem, ...] = ()
    sample_index: int = 0
    priority: int = 0
    cache_salt: str = ""
    deadline_ns: int = 0
    grammar: GrammarRequest | None = None
    group: str = ""  # the request whose prompt this one shares
    grammar_slot: int = NO_SLOT
    envelope: bytes = b""
    thinking: ThinkingBudget | None = None
    outputs: bytes = b""
    adapter: Adapter | None = None  # with which it is computed


class GrammarReady(EventBase, frozen=True):
    """Observation: the grammar of a request is compiled; it may run."""

    request_id: str


class GrammarFailed(EventBase, frozen=True):
    """Observation: the grammar of a request cannot be compiled; it ends with an error."""

    request_id: str
    detail: str


class Cancelled(EventBase, frozen=True):
    """Observation: the consumer left ("cancelled") or the deadline passed ("deadline")."""

    request_id: str
    reason: str


class Preempted(EventBase, frozen=True):
    """Decision: the request loses its row and blocks, and waits again. Its KV is dropped
    ("recompute") or copied to `host_blocks` ("swap").

    `for_row`: the row that it makes room for, with a chunk of `for_tokens`, or FOR_ALL."""

    request_id: str
    row: int
    mode: str
    reason: str
    host_blocks: bytes = b""
    for_row: int = FOR_ALL
    for_tokens: int = 0


class Scheduled(EventBase, frozen=True):
    """Decision that opens a step: which running rows compute how many tokens.

    `rows` None: those of the step before. `num_tokens` None: one each. `new_blocks` are dealt to
    the rows in order, to each as many as its tokens need.

    `num_drafts`: how many of a row's tokens are drafts, at their end; None: no row has any.
    `drafters`: who made them, by number; None: drafter 0 all of them.
    `num_decided`: running rows up to here are decided for this step; 0: all are.
    """

    rows: bytes | None
    num_tokens: bytes | None
    new_blocks: bytes = b""
    encode: tuple[tuple[bytes, int, int], ...] = ()  # (key, row, media index)
    evict: tuple[bytes, ...] = ()
    num_drafts: bytes | None = None
    drafters: bytes | None = None
    num_decided: int = 0


class Admitted(EventBase, frozen=True):
    """Decision: a waiting request gets a row and joins the step (it opens one if none is open).

    `cached_blocks`: prefix hits; their tokens count as computed. `new_blocks`: the rest.
    `num_computed`: tokens whose KV is there when the step starts, or AS_CACHED. `copy`:
    (source, destination) of a block shared in part. `swap_in`: the request's host blocks are copied
    to the first new ones. Tokens beyond the known ones are placeholders for drafts.
    """

    request_id: str
    row: int
    num_tokens: int
    cached_blocks: bytes
    new_blocks: bytes
    encode: tuple[tuple[bytes, int, int], ...] = ()
    evict: tuple[bytes, ...] = ()
    num_computed: int = AS_CACHED
    copy: tuple[int, int] | None = None
    swap_in: bool = False


class AdmittedWithState(Admitted, frozen=True):
    """Decision: ADMITTED where rows have recurrent states. `state_slot`: the row's. `state_from`: the slot
    that holds the state behind the cached blocks, which is copied, or NO_STATE: it begins at zero.
    `num_shared`: tokens of its beginning that other requests' blocks hold, with or without a state behind
    them."""

    state_slot: int = 0
    state_from: int = NO_STATE
    num_shared: int = 0


class AdmittedWithAdapter(AdmittedWithState, frozen=True):
    """Decision: ADMITTED of a request with a LoRA adapter. `adapters_out`: digests of others, which leave for
    it. Where rows have no recurrent states, `state_slot` and what follows mean nothing."""

    adapters_out: tuple[bytes, ...] = ()


class StatesKept(EventBase, frozen=True):
    """Decision, behind all rows of the open step: the states of `rows` behind their first `num_tokens`, which
    this step computes, are kept in `slots` for prefix hits; what these held is gone. int32 columns."""

    rows: bytes
    num_tokens: bytes
    slots: bytes


class Evicted(EventBase, frozen=True):
    """Decision: encoder outputs leave the cache for a chunk that does not run in this step after all
    (only where decisions are vLLM's). `used`: unreferenced ones that count as just used."""

    keys: tuple[bytes, ...]
    used: tuple[bytes, ...] = ()


class Encoded(EventBase, frozen=True):
    """Decision, the last one of a step (it opens one if none is open): the step computes part of item `index`
    of a request, which is too large for a step. `until`: how much of the item's work is done then
    (encoder_cache/work.py); all of it: its features are there, and `evict` left the cache for them. An item
    that others were computed of before goes on where it was; another one takes its place."""

    request_id: str
    index: int
    until: int
    evict: tuple[bytes, ...] = ()


class Dispatched(EventBase, frozen=True):
    """Decision: the open step is whole, and the next one may open before it ran. Only with max_in_flight
    above 1; else EXECUTED closes the open step."""


class Executed(EventBase, frozen=True):
    """Observation: the oldest step in flight ran; without any, the open one. Indices count the rows that
    sampled, in step order.

    `stops`: (index, kind) where the text ended. `errors`: (index, what) where one row failed.
    `logprobs`: (index, [(token id, logprob), …]).

    `counts`: tokens of each such row (accepted drafts and one more), None: one each; `token_ids`
    holds them one row after the other. `drafts` for the next step, `num_drafts` of each such row and
    the numbers of the `drafters` that made them; None: no drafts, drafter 0. `draft_ns`: what making them
    took, of `device_ns`. `host_ns`: what the process did between the step before and this one; 0: not known.
    `prompt_logprobs`: (index, 1 + k, token ids, float32 logprobs) of prompts of n tokens, both of them
    [n, 1 + k]: the token that stands there, then the k likeliest; of the first token its id alone.
    """

    token_ids: bytes
    stops: tuple[tuple[int, str], ...] = ()
    errors: tuple[tuple[int, str], ...] = ()
    logprobs: tuple[tuple[int, tuple[tuple[int, float], ...]], ...] = ()
    device_ns: int = 0
    counts: bytes | None = None
    drafts: bytes = b""
    num_drafts: bytes | None = None
    drafters: bytes | None = None
    draft_ns: int = 0
    host_ns: int = 0
    prompt_logprobs: tuple[tuple[int, int, bytes, bytes], ...] = ()


class Failed(EventBase, frozen=True):
    """Observation: the executor raised; the oldest step in flight, or the open one, gave nothing, and
    neither did those behind it."""

    error: str


class Finished(EventBase, frozen=True):
    """Decision: the request ended. reason: stop, length, abort, error, rejected.

    `detail` is for people; `code` says why there is no answer, for programs, and is None after stop and
    length."""

    request_id: str
    reason: str
    detail: str = ""
    code: ErrorCode | None = None


class Delivered(EventBase, frozen=True):
    """Observation: the whole answer reached its consumer."""

    request_id: str


class CacheReset(EventBase, frozen=True):
    """Observation: someone asked to forget all cached prefixes. `preempt_running`: requests that run
    start again from nothing."""

    preempt_running: bool = False


class Checkpoint(EventBase, frozen=True):
    """Decision: digest of the whole state at this point.

    `columns`, `requests`: 4 bytes of it for each column of the state, and for each live request."""

    digest: bytes
    columns: bytes = b""
    requests: bytes = b""


class Recovered(EventBase, frozen=True):
    """Observation: the process that wrote the log so far ended, and another one goes on. What runs is
    computed again from its tokens.

    `steps`: numbers of those that were open or in flight. `mode`: how the log was repaired; `cuts`:
    (segment, byte, number of bytes) that were no whole records. `lost`: (request, why) of requests
    that cannot go on. `fingerprints`: of the engine that goes on.
    """

    steps: tuple[int, ...] = ()
    mode: str = "tail"
    cuts: tuple[tuple[str, int, int], ...] = ()
    lost: tuple[tuple[str, str], ...] = ()
    fingerprints: dict[str, str] = {}
    engine_version: str = ""


class Stalled(EventBase, frozen=True):
    """Decision: the loop goes on and gets nowhere. kind: "no progress" or "thrash"."""

    kind: str
    request_id: str
    detail: str


Event: TypeAlias = (
    Started
    | Queued
    | GrammarReady
    | GrammarFailed
    | Cancelled
    | Preempted
    | Scheduled
    | Admitted
    | AdmittedWithState
    | AdmittedWithAdapter
    | StatesKept
    | Evicted
    | Encoded
    | Dispatched
    | Executed
    | Failed
    | Finished
    | Delivered
    | CacheReset
    | Checkpoint
    | Recovered
    | Stalled
    | Offered
    | Fetched
    | Arrived
    | Lost
    | AdapterLoaded
    | AdapterUnloaded
    | SessionOpened
    | Appended
    | Leased
    | LeaseTaken
    | SessionClosed
)
# What the scheduler decides of a step.
StepDecision: TypeAlias = (
    Preempted | Scheduled | Admitted | StatesKept | Evicted | Encoded | Fetched | LeaseTaken
)
TYPES: dict[int, type[Event]] = {
    1: Started,
    2: Queued,
    3: Cancelled,
    4: Preempted,
    5: Scheduled,
    6: Admitted,
    7: Executed,
    8: Failed,
    9: Finished,
    10: Delivered,
    11: CacheReset,
    12: Checkpoint,
    13: GrammarReady,
    14: GrammarFailed,
    15: Stalled,
    16: Evicted,
    17: Dispatched,
    18: Recovered,
    19: Encoded,
    20: Offered,
    21: Fetched,
    22: Arrived,
    23: Lost,
    24: AdapterLoaded,
    25: AdmittedWithState,
    26: StatesKept,
    27: AdapterUnloaded,
    28: AdmittedWithAdapter,
    30: SessionOpened,
    31: Appended,
    32: Leased,
    33: LeaseTaken,
    34: SessionClosed,
}
NUMBERS: dict[type[EventBase], int] = {cls: number for number, cls in TYPES.items()}
OBSERVATIONS = (
    *(Started, Queued, GrammarReady, GrammarFailed, Cancelled, Executed, Failed, Delivered, CacheReset),
    *(Recovered, Offered, Arrived, Lost, AdapterLoaded, AdapterUnloaded),
    *(SessionOpened, Appended, SessionClosed),
)
