"""The whole state as bytes, and back: a fold can begin at a snapshot in place of the first record.

    magic "MMSN" u32 | version u16 | reserved u16 | body length u64 | crc32 u32, little endian
    body: msgpack, integer columns as their raw bytes

Nothing is unpickled. Columns are kept for all rows, token ids and block tables as far as they are
held, what a block holds only where something is cached. What follows from the rest (reference counts
aside, which a test compares) is built again. The digest of the state is stored with it and must come
out again. Fields of the body are only ever added, with a default.
"""

import struct
import zlib
from collections.abc import Callable
from pathlib import Path

import msgspec
import numpy as np

from mmengine.config import EngineConfig
from mmengine.core.flight import Flight
from mmengine.core.free_list import FreeList
from mmengine.core.prefix_index import NO_CONTENT, PrefixIndex
from mmengine.core.request_state import RequestState, queued_of, request_of
from mmengine.core.state import COLUMNS, State
from mmengine.encoder_cache.cache import EncoderCache, encoder_key
from mmengine.errors import ConfigError, CorruptLog, LogError
from mmengine.events import vocabulary as ev
from mmengine.events.segment import snapshot_sequences
from mmengine.events.snapshots import read_snapshot
from mmengine.request import Request

MAGIC = b"MMSN"
VERSION = 1
HEADER = struct.Struct("<4sHHQI")
MAX_BYTES = 2**33
MAX_CELLS = 2**31  # rows x tokens, or KV slots, that settings may ask a fold to hold
# Plain values, restored as they are.
PLAIN = (
    *("num_with_media", "num_arrived", "num_preempted", "resetting", "step", "checkpointed_step"),
    "decision_version",
    *("is_open", "preempted_in_step", "tokens_left", "encoder_left", "scan_from", "num_decided"),
)
NAMES = ("cancelled", "grammar_failed", "thrashing")  # lists of request ids


class _Known(msgspec.Struct, array_like=True):
    """A RequestState. `outputs`: known tokens behind the prompt as of the last time without a row."""

    queued: ev.Queued
    arrival: int
    outputs: bytes
    rank: tuple[int, ...]
    row: int
    preempted: int
    num_cached: int
    waits_for_grammar: bool
    host_blocks: bytes
    num_swapped: int
    admitted_step: int
    idle_preemptions: int
    failures: int
    trial: int
    cancelled: str
    detail: str
    held_media: tuple[int, ...]


class _Step(msgspec.Struct, array_like=True):
    """A step that is open or in flight. `encoded` names requests by their place in `requests`, or
    behind those in `gone`."""

    step: int
    rows: bytes
    sampled: bytes
    num_computed: bytes | None
    num_tokens: int
    filled: tuple[bytes, ...]
    encoded: tuple[tuple[bytes, int, int], ...]
    gone: tuple[bytes, ...]
    swapped: tuple[str, ...]


class _Pool(msgspec.Struct, array_like=True):
    """`stack` and `queue`: the free list's two lines, live entries alone. Cached content by block:
    `blocks`, and what stands there; a key's first block serves hits unless it is in `twins`."""

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


class Body(msgspec.Struct):
    """`sequence`: of the last record that is in it."""

    sequence: int
    digest: bytes
    started: ev.Started
    plain: dict[str, int | bool]
    names: dict[str, tuple[str, ...]]
    suspects: tuple[str, ...]
    columns: dict[str, bytes]
    tokens: tuple[tuple[int, bytes], ...]  # by row
    tables: tuple[tuple[int, bytes], ...]
    requests: tuple[_Known, ...]
    gone: tuple[ev.Queued, ...]  # ended, but steps that are not back encode for them
    waiting: tuple[str, ...]
    free_rows: tuple[int, ...]
    running: bytes
    last_rows: bytes
    pool: _Pool
    encoder: tuple[tuple[bytes, int, int, bool], ...]
    idle: tuple[bytes, ...]
    dropped: tuple[bytes, ...]
    free_host_blocks: bytes
    history: bytes
    open: _Step
    copies: dict[str, tuple[bytes, ...]]
    made_room_for: tuple[int, int]
    flights: tuple[_Step, ...] = ()
    leaving: tuple[tuple[int, tuple[bytes, ...]], ...] = ()


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Body)


def take(state: State, started: ev.Started, sequence: int) -> bytes:
    """The state after record `sequence` of the log that `started` begins.

    Raises ValueError for a log of decision version 1.
    """
    body = _encoder.encode(_body_of(state, started, sequence))
    return HEADER.pack(MAGIC, VERSION, 0, len(body), zlib.crc32(body)) + body


def restore(data: bytes) -> tuple[State, Body]:
    """The state in a snapshot. Raises CorruptLog for anything that `take` did not make."""
    body = _read(data)
    return filled(body), body


def filled(body: Body) -> State:
    """The state that a body tells of. Raises CorruptLog as `restore` does."""
    try:
        state = State(_config_of(body.started))
        _fill(state, body)
        digest = state.digest()
    except (ValueError, IndexError, KeyError, TypeError, OverflowError, ConfigError) as error:
        raise CorruptLog(f"the snapshot contradicts itself: {type(error).__name__}: {error}") from None
    if digest != body.digest:
        raise CorruptLog("the snapshot gives another state than the one it was taken of")
    return state


def newest_before(folder: Path, sequence: int) -> tuple[State, Body] | None:
    """The newest snapshot beside a log, of before record `sequence`, that can be read."""
    return _first_usable(folder, [one for one in snapshot_sequences(folder) if one < sequence][::-1])


def oldest_after(folder: Path, sequence: int) -> tuple[State, Body] | None:
    """The oldest one, of record `sequence` or behind it."""
    return _first_usable(folder, [one for one in snapshot_sequences(folder) if one >= sequence])


def _first_usable(folder: Path, sequences: list[int]) -> tuple[State, Body] | None:
    for sequence in sequences:
        try:
            state, body = restore(read_snapshot(folder, sequence))
        except LogError:
            continue  # another one, or the log from its beginning, says the same
        if body.sequence == sequence:
            return state, body
    return None


def _read(data: bytes) -> Body:
    if len(data) < HEADER.size or data[:4] != MAGIC:
        raise CorruptLog("this is no snapshot: it does not begin as one does")
    _, version, _, length, crc = HEADER.unpack_from(data)
    if version != VERSION:
        raise CorruptLog(f"the snapshot has format {version}; this build reads {VERSION}")
    body = memoryview(data)[HEADER.size :]
    if length != len(body) or zlib.crc32(body) != crc:
        raise CorruptLog("the snapshot is cut short or damaged: its checksum does not match")
    try:
        return _decoder.decode(body)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise CorruptLog(f"the snapshot cannot be read: {error}") from None


def _config_of(started: ev.Started) -> EngineConfig:
    config = EngineConfig.from_dict(started.config)
    config.check_resolved()
    if max(config.max_num_seqs * config.max_model_len, config.num_blocks * config.block_size) > MAX_CELLS:
        raise ValueError("its settings claim more rows or blocks than a fold may hold")
    return config


# From a state


def _body_of(state: State, started: ev.Started, sequence: int) -> Body:
    places = {id(known.request): place for place, known in enumerate(state.requests.values())}
    gone: list[ev.Queued] = []

    def place_of(request: Request) -> int:
        if id(request) not in places:
            places[id(request)] = len(state.requests) + len(gone)
            gone.append(queued_of(request))
        return places[id(request)]

    held = np.flatnonzero(state.num_blocks).tolist()
    return Body(
        sequence=sequence,
        digest=state.digest(),
        started=started,
        plain={name: np.asarray(getattr(state, name)).item() for name in PLAIN},
        names={name: tuple(getattr(state, name)) for name in NAMES},
        suspects=tuple(state.suspects),
        columns={name: getattr(state, name).tobytes() for name in COLUMNS},
        tokens=tuple((row, _row_tokens(state, row)) for row in state.running.tolist()),
        tables=tuple((row, state.block_table[row, : state.num_blocks[row]].tobytes()) for row in held),
        requests=tuple(map(_known_of, state.requests.values())),
        open=_step_of(state, state.open_step(), place_of),
        flights=tuple(_step_of(state, flight, place_of) for flight in state.flights),
        gone=tuple(gone),
        waiting=tuple(known.request.request_id for known in state.waiting),
        free_rows=tuple(state.free_rows),
        running=_ints(state.running),
        last_rows=_ints(state.last_rows),
        pool=_pool_of(state),
        encoder=tuple((key, e.size, e.references, e.valid) for key, e in state.encoder.entries.items()),
        idle=tuple(state.encoder.idle),
        dropped=tuple(state.encoder.dropped),
        free_host_blocks=_ints(state.free_host_blocks),
        history=state.history.saved(),
        copies={name: tuple(map(_ints, parts)) for name, parts in state.step_copies.items()},
        made_room_for=state.made_room_for,
        leaving=tuple((row, tuple(keys)) for row, keys in state.leaving.items()),
    )


def _row_tokens(state: State, row: int) -> bytes:
    """Known tokens and whatever stands behind them: drafts, or their placeholders."""
    behind = max(int(state.num_drafts[row]), int(state.scheduled_drafts[row]))
    return state.token_ids[row, : state.num_tokens[row] + behind].tobytes()


def _known_of(known: RequestState) -> _Known:
    return _Known(
        queued_of(known.request),
        known.arrival,
        known.tokens[known.num_prompt :].tobytes(),
        known.rank,
        known.row,
        known.preempted,
        known.num_cached,
        known.waits_for_grammar,
        _ints(known.host_blocks),
        known.num_swapped,
        known.admitted_step,
        known.idle_preemptions,
        known.failures,
        known.trial,
        known.cancelled,
        known.detail,
        tuple(sorted(known.held_media)),
    )


def _step_of(state: State, flight: Flight, place_of: Callable[[Request], int]) -> _Step:
    # A request that ended gave its host blocks back already; its swap means nothing any more.
    swapped = [known for known in flight.swapped if state.requests.get(known.request.request_id) is known]
    return _Step(
        flight.step,
        _ints(flight.rows),
        _ints(flight.sampled),
        None if flight.num_computed is None else _ints(flight.num_computed),
        flight.num_tokens,
        tuple(map(_ints, flight.filled)),
        tuple((key, place_of(request), index) for key, request, index in flight.encoded),
        tuple(flight.gone),
        tuple(known.request.request_id for known in swapped),
    )


def _pool_of(state: State) -> _Pool:
    pool, index = state.blocks, state.blocks.index
    blocks = np.flatnonzero(index.content != NO_CONTENT)
    stack, queue = pool.free_list.lines()
    return _Pool(
        pool.references.tobytes(),
        stack.tobytes(),
        queue.tobytes(),
        _ints(blocks),
        *(column[blocks].tobytes() for column in index.columns()),
        {int(block): extra for block, extra in index.extra.items()},
        tuple(tuple(twins) for twins in index.twins.values()),
        index.next_content,
    )


def _ints(values: np.ndarray) -> bytes:
    return values.astype(np.int32).tobytes()


# To a state


def _fill(state: State, body: Body) -> None:
    for name in PLAIN:
        setattr(state, name, body.plain[name])
    for name in NAMES:
        getattr(state, name).extend(body.names[name])
    state.suspects.update(dict.fromkeys(body.suspects))
    for name in COLUMNS:
        column = getattr(state, name)
        column[:] = _array(body.columns[name], column.dtype, len(column))
    for wide, rows in ((state.token_ids, body.tokens), (state.block_table, body.tables)):
        for row, values in rows:
            wide[row, : len(values) // 4] = _array(values)
    requests = [_add_request(state, known) for known in body.requests]
    owners = [known.request for known in requests] + [request_of(queued) for queued in body.gone]
    state.waiting.extend(state.requests[name] for name in body.waiting)
    state.free_rows[:] = body.free_rows
    state.running, state.last_rows = _rows(body.running), _rows(body.last_rows)
    _fill_pool(state, body.pool)
    _fill_encoder(state.encoder, body)
    state.free_host_blocks = _array(body.free_host_blocks).copy()
    state.history.restore(body.history)
    state.flights.extend(_flight(state, step, owners) for step in body.flights)
    state.leaving.update((row, list(keys)) for row, keys in body.leaving)
    _fill_open(state, body, _flight(state, body.open, owners))


def _add_request(state: State, saved: _Known) -> RequestState:
    request = request_of(saved.queued)
    known = RequestState(
        request,
        saved.arrival,
        np.concatenate((request.prompt_token_ids, _array(saved.outputs))),
        tuple(encoder_key(item.mm_hash, request.cache_salt) for item in request.media),
        saved.rank,
        saved.row,
        saved.preempted,
        saved.num_cached,
        saved.waits_for_grammar,
        _array(saved.host_blocks),
        saved.num_swapped,
        saved.admitted_step,
        saved.idle_preemptions,
        saved.failures,
        saved.trial,
        saved.cancelled,
        saved.detail,
        set(saved.held_media),
    )
    state.requests[request.request_id] = known
    if known.row >= 0:
        state.requests_by_row[known.row] = known
    return known


def _flight(state: State, saved: _Step, owners: list[Request]) -> Flight:
    return Flight(
        saved.step,
        _rows(saved.rows),
        _rows(saved.sampled),
        None if saved.num_computed is None else _array(saved.num_computed),
        saved.num_tokens,
        list(map(_array, saved.filled)),
        [(key, owners[place], index) for key, place, index in saved.encoded],
        list(saved.gone),
        [state.requests[name] for name in saved.swapped],
    )


def _fill_open(state: State, body: Body, flight: Flight) -> None:
    state.step_rows, state.step_filled = flight.rows, flight.filled
    state.step_encoded, state.step_swapped = flight.encoded, flight.swapped
    state.step_evicted = flight.gone[len(body.dropped) :]
    state.made_room_for = body.made_room_for
    for name, parts in body.copies.items():
        state.step_copies[name] = [_array(part).reshape(-1, 2) for part in parts]


def _fill_pool(state: State, saved: _Pool) -> None:
    pool, num_blocks = state.blocks, state.config.num_blocks
    pool.references[:] = _array(saved.references, np.int32, num_blocks)
    pool.free_list = FreeList(num_blocks)
    pool.free_list.fill(_array(saved.stack), _array(saved.queue))
    pool.index = PrefixIndex(num_blocks, state.content_width)
    blocks = _rows(saved.blocks)
    columns = (
        _array(saved.content, np.int64),
        _array(saved.parent, np.int64),
        _array(saved.tokens).reshape(len(blocks), state.content_width),
        _array(saved.key, np.uint64),
    )
    pool.index.fill(blocks, columns, saved.extra, saved.twins, saved.next_content)


def _fill_encoder(cache: EncoderCache, body: Body) -> None:
    for key, size, references, valid in body.encoder:
        cache.restore(key, size, references, valid)
    if sorted(body.idle) != sorted(cache.idle):
        raise ValueError("the idle encoder outputs are not those that nobody references")
    cache.idle = dict.fromkeys(body.idle)
    cache.dropped.extend(body.dropped)


def _array(data: bytes, dtype: type = np.int32, length: int | None = None) -> np.ndarray:
    values = np.frombuffer(data, dtype)
    if length is not None and len(values) != length:
        raise ValueError(f"a column has {len(values)} values in place of {length}")
    return values


def _rows(data: bytes) -> np.ndarray:
    return _array(data).astype(np.intp)
