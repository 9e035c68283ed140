"""The digest of a state in logs of schema 1: one hash over all of it, which says that two states differ and
not where. It is read for ever, and written on in logs that began with it."""

import hashlib

import numpy as np

from mmengine.core.state.columns import FLIGHT_COLUMNS, ROW_COLUMNS
from mmengine.core.state.state import State


def digest_1(state: State) -> bytes:
    """16 bytes over what decisions read, and over every token so far."""
    digest = hashlib.blake2b(digest_size=16)
    rows = state.running
    for name in ROW_COLUMNS:
        digest.update(getattr(state, name)[rows].tobytes())
    digest.update(rows.astype(np.int32).tobytes())
    for row in rows.tolist():
        digest.update(state.requests_by_row[row].request.request_id.encode() + b"\0")
        digest.update(state.token_ids[row, : state.num_tokens[row] + state.num_drafts[row]].tobytes())
        digest.update(state.block_table[row, : state.num_blocks[row]].tobytes())
    for request in state.waiting:
        digest.update(request.request.request_id.encode() + b"\1" + request.tokens.tobytes())
    for name, req_state in state.requests.items():
        held = sorted(req_state.held_media)
        flags = (req_state.waits_for_grammar, bool(req_state.cancelled))
        swapped = (req_state.num_swapped, *req_state.host_blocks.tolist())
        facts = (
            req_state.arrival,
            req_state.row,
            req_state.num_cached,
            req_state.failures,
            *flags,
            *held,
            *swapped,
        )
        digest.update(name.encode() + b"\2" + np.array(facts, np.int64).tobytes())
        if req_state.isolation_rows:
            digest.update(req_state.isolation_rows.to_bytes(4, "little") + b"\5")
    pool = state.blocks
    digest.update(pool.references.tobytes() + pool.free_list.order().tobytes() + pool.index.content.tobytes())
    for key, entry in state.encoder.entries.items():
        digest.update(key + entry.size.to_bytes(8, "little") + entry.references.to_bytes(8, "little"))
    digest.update(b"".join(state.encoder.idle))
    counters = (state.step, state.num_arrived, len(state.free_rows), *state.free_rows)
    digest.update(np.array(counters, np.int64).tobytes() + state.free_host_blocks.tobytes())
    digest.update(state.last_rows.astype(np.int32).tobytes() + state.history.digest())
    if state.config.max_in_flight > 1:
        _digest_flights(state, digest)
        if state.goodput is not None:
            digest.update(np.array([flight.asked for flight in state.flights], np.int64).tobytes())
    if state.goodput is not None:
        digest.update(state.goodput.digest() + b"\6")
    return digest.digest()


def _digest_flights(state: State, digest: hashlib.blake2b) -> None:
    for name in FLIGHT_COLUMNS:
        digest.update(getattr(state, name).tobytes())
    for flight in state.flights:
        digest.update(flight.rows.astype(np.int32).tobytes() + b"\3")
        digest.update(flight.sampled.astype(np.int32).tobytes() + b"\4")
    for row, keys in state.leaving.items():
        digest.update(row.to_bytes(4, "little") + b"".join(keys))
        digest.update(state.block_table[row, : state.num_blocks[row]].tobytes())
