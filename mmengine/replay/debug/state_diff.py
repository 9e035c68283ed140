"""Compares the states at two positions in a log, value by value."""

from typing import NamedTuple

import numpy as np

from mmengine.core.state.request_state import NO_ROW
from mmengine.core.state.state import State
from mmengine.replay.debug.views import owners_of

MAX_CHANGES = 10_000
_ROW = ("num_tokens", "num_computed", "num_blocks", "scheduled", "num_drafts", "in_flight")
_COUNTERS = ("num_arrived", "num_preempted", "step", "tokens_left", "encoder_left", "is_open", "resetting")


class Change(NamedTuple):
    """A value that differs between two states. `before` or `after` is "" if the state lacks the value."""

    name: str
    before: str
    after: str


def values_of(state: State) -> dict[str, str]:
    """Return the state's values as text, keyed by name."""
    found = {name: str(getattr(state, name)) for name in _COUNTERS}
    found["free blocks"] = str(state.blocks.num_free)
    found["running"] = str(len(state.running))
    found["waiting"] = str(len(state.waiting))
    found["encoder used"] = str(state.encoder.used)
    for name, req_state in state.requests.items():
        where = "waits" if req_state.row == NO_ROW else f"runs in row {req_state.row}"
        found[f"request {name}"] = where + (" (preempted before)" if req_state.preempted else "")
        row = req_state.row
        if row != NO_ROW:
            found |= {f"request {name} {column}": str(getattr(state, column)[row]) for column in _ROW}
        if req_state.held_media:
            held = ", ".join(map(str, sorted(req_state.held_media)))
            found[f"request {name} encoder outputs"] = f"items {held}"
    pool, owners = state.blocks, owners_of(state)
    for block in np.flatnonzero((pool.references > 0) | (pool.content >= 0)).tolist():
        held = ", ".join(owners.get(block, ())) or ("no request" if pool.references[block] else "free")
        content = int(pool.content[block])
        found[f"block {block}"] = held + (f", content {content}" if content >= 0 else "")
    for key, entry in state.encoder.entries.items():
        text = f"{entry.size} embeddings, {entry.references} references"
        found[f"entry {key.hex()[:16]}"] = text + ("" if entry.valid else ", failed")
    for session in state.sessions.all.values():
        text = f"{len(session.tokens)} tokens, {len(session.leased)} leased blocks"
        found[f"session {session.session_id}"] = text
    for digest, loaded in state.adapters.cache.entries.items():
        found[f"adapter {digest.hex()[:12]}"] = f"{loaded.references} rows"
    return found


def changes(before: dict[str, str], after: dict[str, str]) -> list[Change]:
    """Return the values that differ between two states, at most MAX_CHANGES."""
    names = [name for name in {**before, **after} if before.get(name) != after.get(name)]
    return [Change(name, before.get(name, ""), after.get(name, "")) for name in names[:MAX_CHANGES]]
