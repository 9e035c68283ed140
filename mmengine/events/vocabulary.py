"""The events in a log: every change to a request's state, in order.

Observations are facts that only the log knows (arrivals, tokens, failures). Decisions follow from the state,
and `verify` derives them again. Integer columns are little-endian int32 bytes. From 0.1.0 on, fields are only
added at the end, with a default, and a type number is never used twice.
"""

from typing import TypeAlias

import msgspec

from mmengine.errors import ErrorCode
from mmengine.events.event_base import EventBase
from mmengine.events.session_events import Appended as Appended
from mmengine.events.session_events import Leased as Leased
from mmengine.events.session_events import LeaseTaken as LeaseTaken
from mmengine.events.session_events import SessionClosed as SessionClosed
from mmengine.events.session_events import SessionOpened as SessionOpened
from mmengine.events.step_events import AS_CACHED as AS_CACHED
from mmengine.events.step_events import FOR_ALL as FOR_ALL
from mmengine.events.step_events import NO_STATE as NO_STATE
from mmengine.events.step_events import Admitted as Admitted
from mmengine.events.step_events import AdmittedWithAdapter as AdmittedWithAdapter
from mmengine.events.step_events import AdmittedWithState as AdmittedWithState
from mmengine.events.step_events import Dispatched as Dispatched
from mmengine.events.step_events import Encoded as Encoded
from mmengine.events.step_events import Evicted as Evicted
from mmengine.events.step_events import Executed as Executed
from mmengine.events.step_events import Preempted as Preempted
from mmengine.events.step_events import Scheduled as Scheduled
from mmengine.events.step_events import StatesKept as StatesKept
from mmengine.events.store_events import Arrived as Arrived
from mmengine.events.store_events import Fetched as Fetched
from mmengine.events.store_events import Lost as Lost
from mmengine.events.store_events import Offered as Offered
from mmengine.request import Adapter, GrammarRequest, MediaItem, SamplingParams, ThinkingBudget

SCHEMA_VERSION = 1
NO_SLOT = -1  # in place of a slot: the log keeps the grammar in no slot
DEADLINE = "deadline"  # the reason in a Cancelled by the request's own deadline


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


class AdapterLoaded(EventBase, frozen=True):
    """Observation: the adapter's name refers to this LoRA adapter from now on. `source`: its folder."""

    adapter: Adapter
    source: str = ""


class AdapterUnloaded(EventBase, frozen=True):
    """Observation: no new request can name this adapter. Requests that have the adapter continue with it."""

    name: str


class Started(EventBase, frozen=True):
    """Observation, a log's first record: the facts about the engine that a replay needs."""

    schema: int
    engine_version: str
    decision_version: int
    config: dict  # EngineConfig, resolved
    fingerprints: dict[str, str]  # weights, processor, dtype, backend
    num_blocks: int
    constants: FoldConstants = FoldConstants()


class Queued(EventBase, frozen=True):
    """Observation that includes a decision, the place in the queue: a request was accepted.

    `prompt`: int32 token ids. `grammar_slot`: the slot that stores `grammar` from now on, or, if its kind and
    source are empty, the slot that has stored it before (core/state/grammar_slots.py). `envelope`: a server's
    data about the request, such as its arrival time; no decision reads it. `outputs`: the answer's first
    tokens, int32, which the consumer has already; the engine continues after them.
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
    group: str = ""  # the request whose prompt this request shares
    grammar_slot: int = NO_SLOT
    envelope: bytes = b""
    thinking: ThinkingBudget | None = None
    outputs: bytes = b""
    adapter: Adapter | None = None  # the LoRA adapter that computes the request


class GrammarReady(EventBase, frozen=True):
    """Observation: the request's grammar is compiled, so the request may run."""

    request_id: str


class GrammarFailed(EventBase, frozen=True):
    """Observation: the request's grammar cannot be compiled. The request ends with an error."""

    request_id: str
    detail: str


class Cancelled(EventBase, frozen=True):
    """Observation: the consumer left ("cancelled") or the deadline passed ("deadline")."""

    request_id: str
    reason: str


class Failed(EventBase, frozen=True):
    """Observation: the executor raised. The oldest step in flight, or the open step, gave no result, and
    neither did the steps after it.
    """

    error: str


class Finished(EventBase, frozen=True):
    """Decision: the request ended. `reason`: stop, length, abort, error, rejected.

    `detail` is a text for people. `code` tells programs why there is no answer; it is None after stop and
    length.
    """

    request_id: str
    reason: str
    detail: str = ""
    code: ErrorCode | None = None


class Delivered(EventBase, frozen=True):
    """Observation: the whole answer reached its consumer."""

    request_id: str


class CacheReset(EventBase, frozen=True):
    """Observation: a caller asked to forget all cached prefixes. `preempt_running`: the running requests
    start again.
    """

    preempt_running: bool = False


class Checkpoint(EventBase, frozen=True):
    """Decision: a digest of the whole state at this point.

    `columns`, `requests`: 4 bytes for each column and for each live request.
    """

    digest: bytes
    columns: bytes = b""
    requests: bytes = b""


class Recovered(EventBase, frozen=True):
    """Observation: the process that wrote the log so far ended, and another one continues. Running requests
    are computed again from their tokens.

    `steps`: the steps that were open or in flight. `mode`: how the log was repaired; `cuts`: (segment, byte,
    number of bytes) without complete records. `lost`: (request, reason) for requests that cannot continue.
    `fingerprints`: the continuing engine's.
    """

    steps: tuple[int, ...] = ()
    mode: str = "tail"
    cuts: tuple[tuple[str, int, int], ...] = ()
    lost: tuple[tuple[str, str], ...] = ()
    fingerprints: dict[str, str] = {}
    engine_version: str = ""


class Stalled(EventBase, frozen=True):
    """Decision: the loop runs without progress. `kind`: "no progress" or "thrash"."""

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
# The scheduler's decisions about a step.
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
