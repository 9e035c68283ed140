"""Computes a state's digest: a hash over the hashes of all columns (the state's parts, see COLUMN_NAMES). Two
states are equal if their digests are equal. A CHECKPOINT event contains the digest, the first 4 bytes of each
column's hash, and a 4-byte checksum for each live request. If two digests differ, these values show which
columns and requests differ.
"""

import hashlib
import zlib
from collections.abc import Iterator

import msgspec
import numpy as np

from mmengine.core.state.columns import COLUMNS, STATE_COLUMNS
from mmengine.core.state.state import State
from mmengine.events import vocabulary as ev

SHOWN_BYTES = 4  # number of bytes of each column's hash in a checkpoint
# Names of the columns in a checkpoint, in order. A changed list requires a new SCHEMA_VERSION
# (events/vocabulary.py).
COLUMN_NAMES = (
    *(*COLUMNS, "token_ids", "block_table", "running"),
    *("requests", "waiting", "block references", "free blocks", "block content", "encoder cache"),
    *("counters", "free rows", "host blocks", "last rows", "history", "flights", "leaving", "goodput"),
    "kept grammars",
)
# Optional columns, in this order after COLUMN_NAMES.
BLOCK_GROUPS = "block groups"  # for models with block groups
STATE_SLOTS = "state slots"  # for models with recurrent states
ADAPTERS = "adapters"  # for engines with adapters
SESSIONS = "sessions"  # while any session is open
TENANTS = "tenants"  # while several tenants have live requests
_FACTS = 10  # number of values for each request in `_Sums.known`
# Factors for the checksums. Odd factors keep small differences from cancelling out.
_FACTORS = np.frombuffer(hashlib.shake_128(b"mmengine").digest(8 * 64), np.uint64) | np.uint64(1)


def state_digest(state: State) -> bytes:
    """Return a 16-byte digest of all tokens so far, and all other values that decisions read."""
    return checkpoint(state).digest


def checkpoint(state: State) -> ev.Checkpoint:
    """Return CHECKPOINT with the state's digest, hashes and checksums."""
    sums = _Sums(state)
    kept = [state.grammar_slots.digest()]
    kept += [_windows(state)] if state.num_groups > 1 else []
    kept += [_state_slots(state)] if state.config.num_state_slots else []
    kept += [_adapters(state)] if state.config.max_loras else []
    kept += [state.sessions.digest_parts()] if len(state.sessions) else []
    kept += [tenants] if (tenants := state.tenants.digest_parts()) else []
    parts = (*(row.data for row in sums.cells), *sums.wide(), *sums.known(), *_pools(state), *kept)
    leaves = [_hash(part) if len(part) else _NOTHING for part in parts]
    columns = b"".join(leaf[:SHOWN_BYTES] for leaf in leaves)
    return ev.Checkpoint(_hash(b"".join(leaves)), columns, sums.total())


def where_apart(state: State, logged: ev.Checkpoint) -> tuple[list[str], list[tuple[str, int]]]:
    """Return the names of the columns that differ from `logged`, and (id, row or -1) for each request that
    differs. If the states have different numbers of live requests, no requests are returned.
    """
    here = checkpoint(state)
    every = [
        *COLUMN_NAMES,
        *([BLOCK_GROUPS] if state.num_groups > 1 else []),
        *([STATE_SLOTS] if state.config.num_state_slots else []),
        *([ADAPTERS] if state.config.max_loras else []),
        *([SESSIONS] if len(state.sessions) or not state.tenants.digest_parts() else []),
        TENANTS,
    ]
    names = [every[place] for place in differing_places(here.columns, logged.columns) if place < len(every)]
    if len(here.requests) != len(logged.requests):
        return names, []
    live = list(state.requests.items())
    return names, [
        (live[place][0], live[place][1].row) for place in differing_places(here.requests, logged.requests)
    ]


def differing_places(one: bytes, other: bytes) -> list[int]:
    """Return the indices of the 4-byte checksums that differ or exist in only a single argument."""
    count = min(len(one), len(other)) // SHOWN_BYTES
    first, second = (np.frombuffer(sums, np.uint32, count) for sums in (one, other))
    most = max(len(one), len(other)) // SHOWN_BYTES
    return [*np.flatnonzero(first != second).tolist(), *range(count, most)]


def _hash(data: bytes | memoryview) -> bytes:
    return hashlib.blake2b(data, digest_size=16).digest()


_NOTHING = _hash(b"")


class _Sums:
    """Computes the hashes of the columns with request data, and a checksum for each request."""

    def __init__(self, state: State):
        self._state, self._requests = state, list(state.requests.values())
        # [column, running row], for columns with a single value per row
        self.cells = np.array([getattr(state, name)[state.running] for name in COLUMNS], np.int64)
        self._own = [0] * len(self._requests)  # by request: a CRC-32 over values with variable length
        rows = np.array([each.row for each in self._requests], np.int64)
        # row -> index into `_requests`, or -1; the last element belongs to requests without a row
        of_row = np.full(state.config.num_rows + 1, -1, np.int64)
        of_row[rows] = np.arange(len(rows))
        self._places = of_row[state.running]  # index in `_requests` for each running row
        self._facts = np.zeros((len(rows), _FACTS), np.int64)

    def wide(self) -> tuple[bytes, bytes, bytes]:
        state, rows = self._state, self._state.running
        tokens, tables = hashlib.blake2b(digest_size=16), hashlib.blake2b(digest_size=16)
        ends = (state.num_tokens[rows] + state.num_drafts[rows]).tolist()
        own, blocks = self._own, state.num_blocks[rows].tolist()
        for row, place, end, held in zip(rows.tolist(), self._places.tolist(), ends, blocks):
            ids, table = state.token_ids[row, :end].data, state.block_table[row, :held].data
            tokens.update(ids)
            tables.update(table)
            if place >= 0:
                own[place] = zlib.crc32(table, zlib.crc32(ids))
        return tokens.digest(), tables.digest(), rows.astype(np.int32).tobytes()

    def known(self) -> tuple[bytes, bytes]:
        """Return the data for the columns "requests" (values that are not stored per row) and "waiting"."""
        state, rest = self._state, []
        facts = []
        for place, each in enumerate(self._requests):
            media, swapped = len(each.held_media), len(each.host_blocks)
            facts.append(
                (
                    *(each.arrival, each.row, each.num_cached, each.failures, each.isolation_rows),
                    *(each.waits_for_grammar, bool(each.cancelled), each.num_swapped, media, swapped),
                )
            )
            if media or swapped:
                held = np.array(sorted(each.held_media), np.int32).tobytes() + each.host_blocks.tobytes()
                rest.append(held)
                self._own[place] = zlib.crc32(held, self._own[place])
            if each.store or each.num_offered:
                told = np.array((each.store, each.num_offered, each.num_fetching), np.int32).tobytes()
                rest.append(told + each.fetch_blocks.tobytes())
                self._own[place] = zlib.crc32(rest[-1], self._own[place])
        if facts:
            self._facts = np.array(facts, np.int64)
        names = msgspec.msgpack.encode(list(state.requests))
        waiting, places = hashlib.blake2b(digest_size=16), dict(zip(state.requests, range(len(facts))))
        for each in state.waiting:
            name = each.request.request_id
            waiting.update(len(each.tokens).to_bytes(4, "little") + name.encode() + b"\0")
            waiting.update(each.tokens.data)
            self._own[places[name]] = zlib.crc32(each.tokens.data, self._own[places[name]])
        return names + self._facts.tobytes() + b"".join(rest), waiting.digest()

    def total(self) -> bytes:
        facts = self._facts.view(np.uint64)
        sums = (facts * _FACTORS[:_FACTS]).sum(axis=1, dtype=np.uint64)
        sums += np.array(self._own, np.uint64) * _FACTORS[_FACTS]
        factors = _FACTORS[_FACTS + 1 : _FACTS + 1 + len(COLUMNS), None]
        of_row, places = (self.cells.view(np.uint64) * factors).sum(axis=0, dtype=np.uint64), self._places
        if (places < 0).any():  # requests have left while a step still computes their rows
            of_row, places = of_row[places >= 0], places[places >= 0]
        sums[places] += of_row
        sums ^= sums >> np.uint64(29)
        return ((sums * _FACTORS[-1]) >> np.uint64(32)).astype(np.uint32).tobytes()


def _windows(state: State) -> bytes:
    held = np.flatnonzero(state.num_blocks)
    tables = state.windows.tables[:, held, : int(state.num_blocks.max(initial=0))]
    return (
        tables.tobytes() + state.windows.first_held[:, held].tobytes() + state.blocks.windows.keys.tobytes()
    )


def _state_slots(state: State) -> bytes:
    of_rows = (getattr(state, name)[state.running] for name in STATE_COLUMNS)
    columns = (column.tobytes() for column in (*of_rows, *state.states.columns()))
    return b"".join(columns) + state.states.clock.to_bytes(8, "little")


def _adapters(state: State) -> bytes:
    pool = state.adapters
    entries = [(key, entry.size, entry.references) for key, entry in pool.cache.entries.items()]
    rows, known = sorted(pool.of_row.items()), list(pool.known.values())
    return msgspec.msgpack.encode((entries, list(pool.cache.idle), rows, known))


def _pools(state: State) -> Iterator[bytes]:
    pool, encoder, several = state.blocks, state.encoder, state.config.max_in_flight > 1
    yield pool.references.tobytes()
    yield pool.free_list.order().tobytes()
    yield pool.index.content.tobytes()
    entries = [(key, entry.size, entry.references) for key, entry in encoder.entries.items()]
    part = (state.part,) if state.config.encoder_piece else ()
    yield msgspec.msgpack.encode((entries, list(encoder.idle), *part))
    yield np.array((state.step, state.num_arrived), np.int64).tobytes()
    yield np.array(state.free_rows, np.int32).tobytes()
    yield state.free_host_blocks.tobytes()
    yield state.last_rows.astype(np.int32).tobytes()
    yield state.history.digest()
    flights = several and [
        (
            flight.rows.astype(np.int32).tobytes(),
            flight.sampled.astype(np.int32).tobytes(),
            flight.draft_level,
        )
        for flight in state.flights
    ]
    yield msgspec.msgpack.encode(flights) if flights else b""
    leaving = [
        (
            *(row, keys, int(state.in_flight[row]), int(state.num_pending[row])),
            state.block_table[row, : state.num_blocks[row]].tobytes(),
        )
        for row, keys in state.leaving.items()
    ]
    yield msgspec.msgpack.encode(leaving) if leaving else b""
    yield state.goodput.digest() if state.goodput is not None else b""
