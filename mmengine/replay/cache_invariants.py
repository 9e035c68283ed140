"""Checks the invariants of the encoder cache, the adapter pool and the sessions. invariants.py lists the
invariants' names.

Each function yields a sentence for each violation.
"""

from collections import Counter
from collections.abc import Iterator

from mmengine.core.state.adapters import digest_of
from mmengine.core.state.columns import NEVER, RUNS_ON
from mmengine.core.state.state import State


def broken_media(state: State) -> Iterator[str]:
    """Check that each row holds the encoder outputs that its step reads. Between steps, a row whose position
    is inside a media item must hold the item's encoder output.
    """
    for row in state.running[state.ended[state.running] == RUNS_ON].tolist():
        req_state, computed = state.requests_by_row[row], int(state.num_computed[row])
        before = computed - int(state.scheduled[row])
        for index, item in enumerate(req_state.request.media):
            if not any(start < computed and before < start + length for start, length in item.runs):
                continue
            entry = state.encoder.entries.get(req_state.media_keys[index])
            if index not in req_state.held_media or (entry is not None and not entry.valid):
                yield (
                    f"row {row} went from {before} to {computed} computed tokens, which needs media item "
                    f"{index} of request {req_state.request.request_id!r}, but the row holds no valid "
                    "encoder output of this item"
                )


def broken_parts(state: State) -> Iterator[str]:
    """Check that each step's encoder work is within the limit `encoder_piece`. Also check that an item that
    is encoded in parts belongs to a request, is unfinished, and is not in the encoder cache.
    """
    piece = state.config.encoder_piece
    if not piece:
        return
    if state.work_left < 0:
        yield (
            f"the step has {piece - state.work_left} units of encoder work for whole items; the limit is "
            f"{piece} (encoder_piece)"
        )
    part = state.step_part
    if part is not None and not 0 < part.until - part.start <= piece:
        yield (
            f"the step encodes item {part.item} of request {part.request_id!r} from {part.start} to "
            f"{part.until} of its work; a step may do at most {piece} units (encoder_piece)"
        )
    if state.part is None:
        return
    name, key, item, _, until = state.part
    owner = state.requests.get(name)
    if owner is None or item >= len(owner.media_keys) or owner.media_keys[item] != key:
        yield f"item {item} of request {name!r} is encoded in parts, but no live request has this item"
    elif until >= owner.media_work[item]:
        yield f"item {item} of request {name!r} counts as unfinished, but all of its work is done"
    elif state.encoder.has(key):
        yield f"item {item} of request {name!r} is in the encoder cache, but is still encoded in parts"


def broken_encoder(state: State) -> Iterator[str]:
    """Check that the encoder cache is within its capacity, and that reference counts equal the numbers of
    rows that hold the entries.
    """
    cache = state.encoder
    size = sum(entry.size for entry in cache.entries.values())
    if not cache.used == size <= cache.capacity:
        yield (
            f"the encoder cache counts {cache.used} embeddings, and its entries have {size}; these numbers "
            f"must be equal, and at most the capacity {cache.capacity}"
        )
    idle = sum(entry.size for entry in cache.entries.values() if not entry.references)
    if cache.idle_size != idle:
        yield (
            f"the encoder cache counts {cache.idle_size} embeddings in entries without references, but these "
            f"entries have {idle}"
        )
    holders = Counter(key for keys in state.leaving.values() for key in keys)
    for row in state.running.tolist():
        req_state = state.requests_by_row[row]
        holders.update(req_state.media_keys[index] for index in req_state.held_media)
        if (state.release_at[row] == NEVER) != (not req_state.held_media):
            release_at = int(state.release_at[row])
            due = "never" if release_at == NEVER else f"at {release_at} computed tokens"
            count = len(req_state.held_media)
            yield f"row {row} holds {count} encoder outputs, but releases the next one {due}"
    for key, entry in cache.entries.items():
        if entry.references != holders[key]:
            yield (
                f"encoder entry {key.hex()[:8]} has {entry.references} references, but "
                f"{holders[key]} rows hold it"
            )
        if (key in cache.idle) != (entry.references == 0):
            listed = "is" if key in cache.idle else "is not"
            yield (
                f"encoder entry {key.hex()[:8]} has {entry.references} references, but {listed} in the list "
                "of entries without references"
            )
    if gone := holders.keys() - cache.entries.keys():
        yield f"rows hold {len(gone)} media items that are not in the encoder cache"


def broken_adapters(state: State) -> Iterator[str]:
    """Check that adapters stay within their limits, and that each row holds its request's adapter."""
    pool, config = state.adapters, state.config
    wanted = {
        row: adapter.digest
        for row in state.running.tolist()
        if (adapter := state.requests_by_row[row].request.adapter) is not None
    }
    there = {row: digest for row, digest in pool.of_row.items() if row not in state.leaving}
    if there != wanted:
        rows = sorted(row for row in there.keys() | wanted.keys() if there.get(row) != wanted.get(row))
        yield f"the adapters that the rows {rows} hold are not the adapters of their requests"
    holders = Counter(pool.of_row.values())
    counted = {key: entry.references for key, entry in pool.cache.entries.items() if entry.references}
    if different := [key for key in counted.keys() | holders.keys() if counted.get(key, 0) != holders[key]]:
        key = min(different)
        references = counted.get(key, 0)
        yield f"adapter {key.hex()[:8]} has {references} references, but {holders[key]} rows hold it"
    if pool.num_held > config.max_loras:
        yield f"rows hold {pool.num_held} adapters; the limit is {config.max_loras} (max_loras)"
    if pool.cache.used > config.lora_bytes:
        yield f"the adapters take {pool.cache.used} bytes; the limit is {config.lora_bytes} (lora_bytes)"
    if pool.nameless:
        asked = {digest_of(req_state.request.adapter) for req_state in state.requests.values()}
        named = {loaded.adapter.digest for loaded in pool.known.values()}
        if wrong := pool.nameless.keys() - (asked - named):
            yield (
                f"{len(wrong)} adapters count as nameless, but a name still refers to them, or no request "
                "uses them"
            )
