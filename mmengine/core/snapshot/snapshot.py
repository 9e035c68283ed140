"""Converts a state to bytes and back. A log reader can begin at a snapshot and skip all earlier records.

    magic "mmsn" u32 | version u16 | reserved u16 | body length u64 | crc32 u32, little endian
    body: msgpack, integer columns as their raw bytes

A snapshot contains all rows' columns, the used token ids and block tables, the contents of cached blocks, and
the other fields in body.py. All other values are derived from these fields. Restoring also checks the digests
of the state and of the undelivered answers. No pickle is used.
"""

import hashlib
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeAlias

import msgspec

from mmengine.config import EngineConfig
from mmengine.core.snapshot.body import Body, SavedAnswers
from mmengine.core.snapshot.restoring import fill, fill_around
from mmengine.core.snapshot.saving import body_of
from mmengine.core.state.digest import state_digest
from mmengine.core.state.request_state import RequestState
from mmengine.core.state.state import State
from mmengine.errors import ConfigError, CorruptLog, LogError
from mmengine.events import vocabulary as ev
from mmengine.events.segment import snapshot_sequences
from mmengine.events.snapshots import HEADER, MAGIC, read_snapshot

VERSION = 1
_OLD_MAGIC = b"MMSN"  # the magic in snapshots of builds before 0.1.0
MAX_CELLS = 2**31  # limit on rows x tokens, and on KV slots, in a log's settings

Live: TypeAlias = tuple[list[RequestState], list[RequestState]]  # live requests, waiting requests

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Body)


def take(state: State, started: ev.Started, sequence: int) -> bytes:
    """Return a snapshot of the state. `started`: the log's first event. `sequence`: the last
    record that was applied to the state.
    """
    return bytes(packed(body_of(state, started, sequence)))


def packed(body: Body, answers: SavedAnswers | None = None) -> bytearray:
    """Return the bytes of a snapshot that contains `body` and the undelivered answers. Any thread may call
    this function, because the body is a copy of the state.
    """
    if answers is not None:
        body.answers = _encoder.encode(answers)
        body.answers_digest = digest_of(body.answers)
    data = bytearray(HEADER.size)
    _encoder.encode_into(body, data, HEADER.size)
    length, crc = len(data) - HEADER.size, zlib.crc32(memoryview(data)[HEADER.size :])
    HEADER.pack_into(data, 0, MAGIC, VERSION, 0, length, crc)
    return data


def restore(data: bytes) -> tuple[State, Body]:
    """Return the state and the body in a snapshot. Raises CorruptLog if the bytes are not a valid
    snapshot.
    """
    body = _read(data)
    return filled(body), body


def filled(body: Body) -> State:
    """Return the state that a body describes. Raises CorruptLog if the body is invalid."""
    with _naming_contradictions():
        state = _unfilled(body, _config_of(body.started))
        fill(state, body)
        digest = state_digest(state)
    if digest != body.digest:
        raise CorruptLog("the restored state differs from the state that the snapshot was taken of")
    return state


def filled_around(body: Body, config: EngineConfig, live: Callable[[State], Live]) -> State:
    """Return the state that consists of `body` and the live requests. `body` has neither requests nor a
    digest (`body_without_requests`). `config`: the state's settings. `live`: a function that returns the
    ordered lists of live requests and waiting requests. Raises CorruptLog if the body is invalid.
    """
    with _naming_contradictions():
        state = _unfilled(body, config)
        state.grammar_slots.restore(body.grammar_slots)
        fill_around(state, body, *live(state))
    return state


def _unfilled(body: Body, config: EngineConfig) -> State:
    state = State(config)
    state.constants = body.started.constants
    return state


@contextmanager
def _naming_contradictions() -> Iterator[None]:
    try:
        yield
    except (ValueError, IndexError, KeyError, TypeError, OverflowError, ConfigError) as error:
        raise CorruptLog(f"the snapshot contradicts itself: {type(error).__name__}: {error}") from None


def newest_before(folder: Path, sequence: int) -> tuple[State, Body] | None:
    """Return (state, body) of the newest readable snapshot before record `sequence`, or None."""
    return next(newest_first(folder, sequence), None)


def newest_first(folder: Path, before: int) -> Iterator[tuple[State, Body]]:
    """Yield (state, body) of each readable snapshot before record `before`, newest first."""
    return _usable(folder, [one for one in snapshot_sequences(folder) if one < before][::-1])


def oldest_after(folder: Path, sequence: int) -> tuple[State, Body] | None:
    """Return (state, body) of the oldest readable snapshot at record `sequence` or later, or None."""
    return next(_usable(folder, [one for one in snapshot_sequences(folder) if one >= sequence]), None)


def _usable(folder: Path, sequences: list[int]) -> Iterator[tuple[State, Body]]:
    for sequence in sequences:
        try:
            state, body = restore(read_snapshot(folder, sequence))
        except LogError:
            continue  # readers can use an older snapshot or the whole log
        if body.sequence == sequence:
            yield state, body


def digest_of(answers: bytes) -> bytes:
    return hashlib.blake2b(answers, digest_size=16).digest()


def _read(data: bytes) -> Body:
    if data[:4] == _OLD_MAGIC:
        raise CorruptLog("this snapshot was written before 0.1.0; read it with the build that wrote it")
    if len(data) < HEADER.size or data[:4] != MAGIC:
        raise CorruptLog("not a snapshot: it does not begin like one")
    _, version, _, length, crc = HEADER.unpack_from(data)
    if version != VERSION:
        raise CorruptLog(f"the snapshot has format {version}; this build reads format {VERSION}")
    body = memoryview(data)[HEADER.size :]
    if length != len(body) or zlib.crc32(body) != crc:
        raise CorruptLog("the snapshot is cut short or damaged: its checksum does not match")
    try:
        return _decoder.decode(body)
    except (msgspec.MsgspecError, ValueError, RecursionError, LookupError) as error:
        raise CorruptLog(f"the snapshot cannot be read: {error}") from None


def _config_of(started: ev.Started) -> EngineConfig:
    config = EngineConfig.from_dict(started.config)
    config.check_resolved()
    if max(config.num_rows * config.max_model_len, config.num_blocks * config.block_size) > MAX_CELLS:
        raise ValueError("its settings have more rows or blocks than a reader may allocate")
    return config
