"""Defines the fields of a snapshot's body, the serialised form of a state. New versions may only add fields
with a default.

If the state has a field with the same name, the annotation says how the value is converted (field_forms.py).
saving.py computes all other fields, and restoring.py reads them.
"""

from typing import Annotated, TypeAlias

import msgspec

from mmengine.core.snapshot.field_forms import INTS, INTS_OR_NONE, LIST, MANY_INTS, ROWS, SET, TRIPLES
from mmengine.core.state.draft_arbiter import NO_DRAFTERS, SavedGoodput
from mmengine.core.state.flight import Part
from mmengine.core.state.sessions import Chunk, Place
from mmengine.errors import ErrorCode
from mmengine.events import vocabulary as ev
from mmengine.request import MediaItem

# Names of the fields of State that hold a single number or bool.
PLAIN = (
    *("num_with_media", "num_arrived", "num_preempted", "resetting", "step", "checkpointed_step"),
    *("is_open", "preempted_in_step", "tokens_left", "encoder_left", "num_decided"),
)
NAMES = ("cancelled", "grammar_failed", "thrashing")  # names of the fields of State that list request ids


class Known(msgspec.Struct, array_like=True):
    """A saved RequestState. `outputs`: the answer tokens at the time when the request last lost its row."""

    queued: ev.Queued
    arrival: int
    outputs: bytes
    rank: tuple[int, ...]
    row: int
    preempted: int
    num_cached: int
    waits_for_grammar: bool
    host_blocks: Annotated[bytes, INTS]
    num_swapped: int
    admitted_step: int
    idle_preemptions: int
    failures: int
    isolation_rows: int
    cancelled: str
    detail: str
    held_media: Annotated[tuple[int, ...], SET]
    store: int = 0
    num_offered: int = 0
    fetch_blocks: Annotated[bytes, INTS] = b""
    num_fetching: int = 0


class Step(msgspec.Struct, array_like=True):
    """A saved Flight: a step that is open or in flight. `encoded`: (key, request number, index in the
    request's media). A request number is an index into the list `Body.requests` followed by `Body.gone`.
    """

    step: int
    rows: Annotated[bytes, ROWS]
    sampled: Annotated[bytes, ROWS]
    num_computed: Annotated[bytes | None, INTS_OR_NONE]
    num_tokens: int
    filled: Annotated[tuple[bytes, ...], MANY_INTS]
    encoded: tuple[tuple[bytes, int, int], ...]
    gone: Annotated[tuple[bytes, ...], LIST]
    swapped: tuple[str, ...]
    draft_level: int = NO_DRAFTERS
    part_of: str = ""
    kept: Annotated[tuple[bytes, ...], TRIPLES] = ()
    num_drafts: Annotated[bytes | None, INTS_OR_NONE] = None
    num_scheduled: Annotated[bytes | None, INTS_OR_NONE] = None


class Pool(msgspec.Struct, array_like=True):
    """The saved block pool.

    `stack`, `queue`: the live entries of the free list's two parts. `blocks`: the blocks with cached
    content; `content`, `parent`, `tokens` and `key` describe these blocks in the same order. `twins`:
    groups of blocks with equal content, each without the block that lookups return.
    """

    references: bytes
    stack: bytes
    queue: bytes
    blocks: bytes
    content: bytes
    parent: bytes
    tokens: bytes
    key: bytes
    extra: dict[int, bytes]
    twins: tuple[tuple[int, ...], ...]
    next_content: int


class Windows(msgspec.Struct, array_like=True):
    """The saved blocks of block groups with a window.

    `rows`: (row, `first_held`, blocks) for each row that holds blocks, as in WindowTables. `blocks`, `keys`:
    the blocks whose content is recorded, and these blocks' keys. `contents`: the pool's `window_content` if
    the log follows vLLM's scheduling rules, otherwise empty.
    """

    rows: tuple[tuple[int, bytes, bytes], ...]
    blocks: bytes
    keys: bytes
    contents: bytes = b""


class States(msgspec.Struct, array_like=True):
    """The saved slots for recurrent states. `rows`: column name -> the column's values for all rows. `held`,
    `content`, `block`, `used`: columns with a value for each slot. `clock`: the counter for `used`.
    """

    rows: dict[str, bytes]
    held: bytes
    content: bytes
    block: bytes
    used: bytes
    clock: int


class Adapters(msgspec.Struct, array_like=True):
    """The saved LoRA adapters.

    `entries`: (digest, size in bytes, number of rows that use the adapter) for each loaded adapter. `idle`:
    digests of unused adapters, least recently used first. `rows`: row -> its adapter's digest. `known`,
    `nameless`: the values of AdapterPool's dicts `known` and `nameless`.
    """

    entries: tuple[tuple[bytes, int, int], ...]
    idle: tuple[bytes, ...]
    rows: dict[int, bytes]
    known: tuple[ev.AdapterLoaded, ...]
    nameless: tuple[ev.AdapterLoaded, ...] = ()


class Session(msgspec.Struct, array_like=True):
    """A saved SessionState."""

    session_id: str
    cache_salt: str
    idle_ns: int
    envelope: bytes
    tokens: Annotated[bytes, INTS]
    media: tuple[MediaItem, ...]
    chunks: tuple[Chunk, ...]
    live: str
    place: Place
    leased: Annotated[bytes, INTS]
    used: int
    num_grown: int = 0
    is_settled: bool = False


class Scores(msgspec.Struct, array_like=True):
    """The saved logprobs for an answer and its prompt, and a pooled request's vector.

    `of_prompt`: (number of logprobs per token, token ids as int32 bytes, logprobs as float32 bytes).
    `vector`: float32 bytes.
    """

    logprobs: tuple[tuple[tuple[int, float], ...], ...] | None = None
    of_prompt: tuple[int, bytes, bytes] | None = None
    vector: bytes = b""


class Answer(msgspec.Struct, array_like=True):
    """The saved answer to a request that has ended. `token_ids`: int32 bytes."""

    queued: ev.Queued
    token_ids: bytes
    reason: str
    detail: str
    num_cached: int
    scores: Scores
    code: ErrorCode | None = None


# The token order of a prompt with several choices: (id of the first choice, ids of all choices, order). The
# id of a forgotten choice is "". `order` has a byte for each token: the index of the token's choice.
SavedOrder: TypeAlias = tuple[str, tuple[str, ...], bytes]


class SavedAnswers(msgspec.Struct, array_like=True):
    """The saved undelivered answers.

    `begins`: (request id, record number of its QUEUED), ascending by number. `answers`: for requests that
    have ended. `scores`: (request id, logprobs) for live requests. `lacking`: requests with too many logprobs
    for a snapshot. `fingerprints`: from the last RECOVERED event. `orders`: for prompts with several choices.
    """

    begins: tuple[tuple[str, int], ...]
    answers: tuple[Answer, ...]
    scores: tuple[tuple[str, Scores], ...]
    lacking: tuple[str, ...]
    fingerprints: dict[str, str]
    orders: tuple[SavedOrder, ...] = ()


class Body(msgspec.Struct):
    """The body of a snapshot.

    `sequence`: the number of the last record that was applied to the state. `digest`: the state's digest.
    `answers`, `answers_digest`: a SavedAnswers as msgpack bytes, and the BLAKE2b hash of these bytes. Both
    fields are empty if the process that took the snapshot did not know the undelivered answers.
    """

    sequence: int
    digest: bytes
    started: ev.Started
    plain: dict[str, int | bool]
    names: dict[str, tuple[str, ...]]
    suspects: tuple[str, ...]
    columns: dict[str, bytes]
    tokens: tuple[tuple[int, bytes], ...]  # (row, int32 token ids)
    tables: tuple[tuple[int, bytes], ...]  # (row, int32 block ids)
    requests: tuple[Known, ...]
    gone: tuple[ev.Queued, ...]  # ended requests whose media items are computed by steps in flight
    waiting: tuple[str, ...]
    free_rows: tuple[int, ...]
    running: bytes
    last_rows: bytes
    pool: Pool
    encoder: tuple[tuple[bytes, int, int, bool], ...]
    idle: tuple[bytes, ...]
    dropped: tuple[bytes, ...]
    free_host_blocks: bytes
    history: bytes
    open: Step
    copies: dict[str, tuple[bytes, ...]]
    made_room_for: tuple[int, int]
    flights: tuple[Step, ...] = ()
    leaving: tuple[tuple[int, tuple[bytes, ...]], ...] = ()
    goodput: SavedGoodput | None = None
    grammar_slots: tuple[tuple[int, str, str], ...] = ()  # (slot, kind, source)
    answers: bytes = b""
    answers_digest: bytes = b""
    work_left: int = 0
    part: Part | None = None
    step_part: Part | None = None
    states: States | None = None  # for models with recurrent states
    adapters: Adapters | None = None  # for engines with adapters
    sessions: tuple[Session, ...] = ()
    sessions_clock: int = 0
    num_prefills: int = 0
    # (name, debt, turn, number of waiting requests that the open step passed over)
    tenants: tuple[tuple[str, int, int, int], ...] = ()
    turns: int = 0
    windows: Windows | None = None  # for models with block groups
