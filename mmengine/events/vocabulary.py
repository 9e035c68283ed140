"""Defines the events in a log. Every change of the engine's state is an event. Observations are facts that a
replay cannot derive (arrivals, tokens, failures). Decisions follow from the state, and `mmengine log verify`
derives them again. Integer columns are little-endian int32 bytes. From 0.1.0 on, new fields have a default
and come last, and no type number is used for another event.
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
from mmengine.events.step_events import Drafted as Drafted
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
from mmengine.request import Adapter, GrammarRequest, MediaItem, Pooling, SamplingParams, ThinkingBudget

SCHEMA_VERSION = 1
NO_SLOT = -1  # value of `grammar_slot`: the request uses no slot
ANSWERED = ("stop", "length", "repetition")  # values of Finished.reason for complete answers
DEADLINE = "deadline"  # value of Cancelled.reason if the request's deadline has passed


class FoldConstants(msgspec.Struct, array_like=True, frozen=True):
    """Constants that determine how a reader applies the decisions in a log. The defaults describe mmengine's
    scheduler. Logs with vLLM's decisions have other values.

    `isolates_failures`: after a step failed, its requests run apart from other requests.
    `keeps_broken_blocks`: blocks from a row with NaN logits stay in the prefix cache. `frees_at_once`: a
    request that ends while its step runs frees its blocks immediately. `fills_in_row_order`: if several rows
    fill equal blocks in a step, prefix cache hits use the first row's block. `media_ahead`: a block's hash
    also covers media that begin up to this many tokens after the block. `salts_media`: an item's key in the
    encoder cache depends on the item's hash, the request's salt and its adapter. `media_held_ahead`: how many
    tokens after an item must be computed before the item's encoder output is released. `fills_with_results`:
    a full block enters the prefix cache when the tokens from the step that filled the block arrive. If False,
    the block enters the cache when the row's next step is scheduled. `knows_contents`: the log tells the
    contents of all cached KV blocks. False if the log began while requests ran, or if KV came from a
    connector. `is_asynchronous`: vLLM's AsyncScheduler made the decisions (core/fold/asynchronous.py).
    """

    isolates_failures: bool = True
    keeps_broken_blocks: bool = False
    frees_at_once: bool = False
    fills_in_row_order: bool = False
    media_ahead: int = 0
    salts_media: bool = True
    media_held_ahead: int = 0
    fills_with_results: bool = False
    knows_contents: bool = True
    is_asynchronous: bool = False


class AdapterLoaded(EventBase, frozen=True):
    """Observation: new requests that name `adapter` use this LoRA adapter. `source`: the adapter's folder."""

    adapter: Adapter
    source: str = ""


class AdapterUnloaded(EventBase, frozen=True):
    """Observation: new requests cannot use the adapter `name`. Earlier requests continue with the adapter."""

    name: str


class Started(EventBase, frozen=True):
    """Observation: the first record in a log, with the facts about the engine that a replay needs.

    `schema`: the version of the events. `engine_version`: the version of mmengine. `decision_version`: the
    version of the scheduling rules. `config`: the engine's settings, with all automatic values resolved.
    `fingerprints`: digests or names for the weights, the processor, the dtype and the backend. `num_blocks`:
    the number of KV blocks, including block 0, which pads batches. `constants`: how a replay applies the
    decisions. `is_host_driven`: a host program called `begin_step` and `finish_step` (HostDrivenCore).
    `host`: the engine whose scheduler made the decisions, such as "vllm 0.32.0", or "" for mmengine.
    docs/reference/recorded-logs.md describes the order of events in logs from other engines.
    """

    schema: int
    engine_version: str
    decision_version: int
    config: dict
    fingerprints: dict[str, str]
    num_blocks: int
    constants: FoldConstants = FoldConstants()
    is_host_driven: bool = False
    host: str = ""


class Queued(EventBase, frozen=True):
    """Observation: a request was accepted. Its place in the queue and `grammar_slot` follow from the state.

    `prompt`: int32 token ids. `sample_index`: the answer's index among several answers to the prompt.
    `priority`: with the priority policy, requests with smaller values run first. `cache_salt`: requests with
    different salts share no cache entry. `deadline_ns`: time from arrival to cancellation, 0 for never.
    `group`: the id of the request whose prompt this request shares. `grammar_slot`: the slot that stores
    `grammar`. A `grammar` with empty kind and source stands for the slot's stored grammar. `envelope`: a
    server's data about the request, such as its arrival time. Decisions ignore the envelope. `thinking`: the
    limit for reasoning tokens. `outputs`: the answer's first tokens, int32, which the consumer already has.
    The engine continues the answer after these tokens. `adapter`: the LoRA adapter, or None for the base
    model. `tenant`: a keyed hash of the API key, or "". The scheduler serves waiting tenants by turns.
    `pooling`: what a prefill-only request returns; None for a request with an answer.
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
    group: str = ""
    grammar_slot: int = NO_SLOT
    envelope: bytes = b""
    thinking: ThinkingBudget | None = None
    outputs: bytes = b""
    adapter: Adapter | None = None
    tenant: str = ""
    pooling: Pooling | None = None


class GrammarReady(EventBase, frozen=True):
    """Observation: the request's grammar is compiled, so the request can be admitted."""

    request_id: str


class GrammarFailed(EventBase, frozen=True):
    """Observation: the request's grammar cannot be compiled. The request ends with the error `detail`."""

    request_id: str
    detail: str


class Cancelled(EventBase, frozen=True):
    """Observation: the request will be aborted. `reason`: "cancelled" if the consumer left, "deadline" if the
    request's deadline has passed, or another text, such as "its session was closed".
    """

    request_id: str
    reason: str


class Failed(EventBase, frozen=True):
    """Observation: the executor raised `error`. All steps in flight failed, or the open step if no step is in
    flight.
    """

    error: str


class Finished(EventBase, frozen=True):
    """Decision: the request ended. `reason`: stop, length, repetition (the answer repeated itself), pooled
    (the result is a vector), abort, error, or rejected (the queue was full).

    `detail`: a text for people. `code`: the error code, or None after stop, length, repetition and pooled.
    """

    request_id: str
    reason: str
    detail: str = ""
    code: ErrorCode | None = None


class Delivered(EventBase, frozen=True):
    """Observation: the consumer received the whole answer."""

    request_id: str


class CacheReset(EventBase, frozen=True):
    """Observation: a caller asked the engine to forget all cached prefixes. `preempt_running`: running
    requests are preempted, and the engine computes their KV again.
    """

    preempt_running: bool = False


class Checkpoint(EventBase, frozen=True):
    """Decision: `digest` covers the whole state at this point.

    `columns`: the first 4 bytes of each state column's hash. `requests`: a 4-byte checksum for each live
    request. If two states differ, these values show where.
    """

    digest: bytes
    columns: bytes = b""
    requests: bytes = b""


class Recovered(EventBase, frozen=True):
    """Observation: a new process continues the log after the previous process ended. Running requests are
    prefilled again from their tokens. `steps`: the numbers of the steps that were open or in flight. `mode`:
    the recovery mode in which the log was read. `cuts`: (segment, offset, number of bytes) for each byte
    range that the repair left out. `lost`: (request, reason) for requests that cannot continue.
    `fingerprints`, `engine_version`: the new engine's values, as in Started.
    """

    steps: tuple[int, ...] = ()
    mode: str = "tail"
    cuts: tuple[tuple[str, int, int], ...] = ()
    lost: tuple[tuple[str, str], ...] = ()
    fingerprints: dict[str, str] = {}
    engine_version: str = ""


class Stalled(EventBase, frozen=True):
    """Decision: the engine makes no progress. `kind`: "no progress" if no request can run, or "thrash" if
    `request_id` was preempted again and again without a new token. `detail`: how full the pools are.
    """

    kind: str
    request_id: str
    detail: str


class Noted(EventBase, frozen=True):
    """Observation in a log of another engine's scheduler: a scheduler call for which no event type exists.
    `kind`: "pause", "encoder cache reset", "connector", or "incomplete" if the recorder stopped here.
    `detail`: a text. The event does not affect the state.
    """

    kind: str
    detail: str = ""


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
    | Drafted
    | Noted
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
    35: Drafted,
    36: Noted,
}
NUMBERS: dict[type[EventBase], int] = {cls: number for number, cls in TYPES.items()}
OBSERVATIONS = (
    *(Started, Queued, GrammarReady, GrammarFailed, Cancelled, Executed, Failed, Delivered, CacheReset),
    *(Recovered, Offered, Arrived, Lost, AdapterLoaded, AdapterUnloaded),
    *(SessionOpened, Appended, SessionClosed, Drafted, Noted),
)
