"""Builds the tables and texts that show a state: counters, rows, blocks, the prefix index, the encoder cache,
sessions, adapters and requests. steps.py builds the tables of the queue and the drafts.
"""

from collections.abc import Callable

import msgspec
import numpy as np

from mmengine.core.state.prefix_index import NO_CONTENT, ROOT
from mmengine.core.state.request_state import NO_ROW
from mmengine.core.state.state import State

MAX_ROWS = 40  # Default maximum number of rows in a table.
Cell = str | int | float


class Table(msgspec.Struct):
    """A table. `note`: a sentence below it, or ""."""

    title: str
    header: tuple[str, ...]
    rows: list[tuple[Cell, ...]]
    note: str = ""


class Text(msgspec.Struct):
    """Lines of text."""

    lines: list[str]


Block = Table | Text


def shortened(table: Table, most: int = MAX_ROWS) -> Table:
    """Return the table with at most `most` rows, and a note that says how many rows are missing."""
    if len(table.rows) > most:
        more = f'{len(table.rows) - most} more rows; add the word "all" to show them'
        table.note = f"{table.note}; {more}" if table.note else more
        table.rows = table.rows[:most]
    return table


def rows_view(state: State) -> Table:
    """Return the running requests, in the order of admission."""
    columns = (
        "row",
        "request",
        "prompt",
        "tokens",
        "computed",
        "scheduled",
        "drafts",
        "blocks",
        "since step",
    )
    rows: list[tuple[Cell, ...]] = []
    for row in state.running.tolist():
        req_state = state.requests_by_row[row]
        numbers = (state.num_tokens, state.num_computed, state.scheduled, state.num_drafts, state.num_blocks)
        values = [int(column[row]) for column in numbers]
        rows.append(
            (row, req_state.request.request_id, req_state.num_prompt, *values, req_state.admitted_step)
        )
    free = f"{len(state.free_rows)} of {state.config.max_num_seqs} rows free"
    return Table("rows", columns, rows, free)


def owners_of(state: State) -> dict[int, list[str]]:
    """Return a dict that maps each block to the requests, sessions and fetches that hold it."""
    owners: dict[int, list[str]] = {}
    for row in np.flatnonzero(state.num_blocks).tolist():
        held = state.requests_by_row[row]
        name = f"row {row}" if held is None else held.request.request_id
        for number, block in enumerate(state.block_table[row, : state.num_blocks[row]].tolist()):
            if block:
                owners.setdefault(block, []).append(f"{name}[{number}]")
        for group, table in enumerate(state.windows.tables[:, row], 1):
            for number in np.flatnonzero(table).tolist():
                owners.setdefault(int(table[number]), []).append(f"{name}[{number}] of group {group}")
    for session in state.sessions.all.values():
        for block in session.leased.tolist():
            owners.setdefault(block, []).append(f"session {session.session_id}")
    for req_state in state.requests.values():
        for block in req_state.fetch_blocks.tolist() if req_state.row == NO_ROW else ():
            owners.setdefault(block, []).append(f"{req_state.request.request_id} (fetches)")
    return owners


def blocks_view(state: State, numbers: list[int] | None = None) -> Table:
    """Return the KV blocks that are held or cached, or the blocks with these numbers."""
    pool, owners = state.blocks, owners_of(state)
    content, parent, tokens, keys = pool.index.columns()
    if numbers is None:
        cached = _cached(state)
        numbers = np.flatnonzero((pool.references > 0) | cached).tolist()
    rows: list[tuple[Cell, ...]] = []
    for block in numbers:
        references = int(pool.references[block])
        is_cached = content[block] != NO_CONTENT
        what = "held" if references else "cached" if _cached(state)[block] else "free"
        known = (int(content[block]), _parent(int(parent[block])), f"{int(keys[block]):016x}")
        first = " ".join(map(str, tokens[block, :4].tolist()))
        about: tuple[Cell, ...] = (*known, f"{first} …") if is_cached else ("", "", "", "")
        rows.append((block, what, references, ", ".join(owners.get(block, ())), *about))
    header = ("block", "state", "references", "owners", "content", "after", "hash", "tokens")
    total = f"{pool.num_free} of {pool.num_blocks - 1} blocks free"
    return Table("blocks", header, rows, total)


def _cached(state: State) -> np.ndarray:
    """Return a bool array that says for each block whether it has a recorded content."""
    of_windows = state.blocks.windows.keys
    cached: np.ndarray = state.blocks.content != NO_CONTENT
    return cached | (of_windows != NO_CONTENT) if len(of_windows) else cached


def _parent(content: int) -> Cell:
    return "start" if content == ROOT else content


def prefix_view(state: State) -> Table:
    """Return the prefix index as a table. Each line shows a content id, its parent, and the blocks with this
    content.
    """
    pool = state.blocks
    content, parent, tokens, _ = pool.index.columns()
    blocks_of: dict[int, list[int]] = {}
    for block in np.flatnonzero(content != NO_CONTENT).tolist():
        blocks_of.setdefault(int(content[block]), []).append(block)
    depth = {ROOT: 0}
    rows: list[tuple[Cell, ...]] = []
    for each in sorted(blocks_of):
        blocks = blocks_of[each]
        before = int(parent[blocks[0]])
        depth[each] = depth.get(before, 0) + 1
        held = sum(int(pool.references[block]) for block in blocks)
        extra = pool.index.extra.get(blocks[0], b"")
        about = f"{len(extra)} bytes" if extra else ""
        first = " ".join(map(str, tokens[blocks[0], :4].tolist()))
        rows.append(
            (each, _parent(before), depth[each], ", ".join(map(str, blocks)), held, about, f"{first} …")
        )
    header = ("content", "after", "depth", "blocks", "references", "media or salt", "tokens")
    return Table(
        "prefix index", header, rows, f"{len(rows)} contents in {sum(map(len, blocks_of.values()))} blocks"
    )


def encoder_view(state: State) -> Table:
    """Return the encoder cache's entries with the requests that hold them."""
    holders: dict[bytes, list[str]] = {}
    for name, req_state in state.requests.items():
        for item in sorted(req_state.held_media):
            holders.setdefault(req_state.media_keys[item], []).append(f"{name}[{item}]")
    order = {key: place for place, key in enumerate(state.encoder.idle)}
    rows: list[tuple[Cell, ...]] = []
    for key, entry in state.encoder.entries.items():
        idle: Cell = order[key] + 1 if key in order else ""
        held = ", ".join(holders.get(key, ()))
        note = "" if entry.valid else "its step failed"
        rows.append((key.hex()[:16], entry.size, entry.references, held, idle, note))
    header = ("entry", "embeddings", "references", "holders", "evicted as", "")
    return Table("encoder cache", header, rows, f"{state.encoder.used} of {state.encoder.capacity} used")


def sessions_view(state: State) -> Table:
    """Return the open sessions."""
    rows: list[tuple[Cell, ...]] = [
        (each.session_id, each.num_grown, len(each.tokens), len(each.media), len(each.leased), each.live)
        for each in state.sessions.all.values()
    ]
    header = ("session", "requests", "tokens", "media", "leased blocks", "live request")
    limit = f"{state.sessions.num_leased} of {state.config.most_leased} blocks leased"
    return Table("sessions", header, rows, limit)


def adapters_view(state: State) -> Table:
    """Return the loaded adapters, and the requests that use them."""
    pool = state.adapters
    names = {loaded.adapter.digest: loaded.adapter.name for loaded in pool.known.values()}
    users: dict[bytes, list[str]] = {}
    for row, digest in pool.of_row.items():
        held = state.requests_by_row[row]
        users.setdefault(digest, []).append(f"row {row}" if held is None else held.request.request_id)
    rows: list[tuple[Cell, ...]] = [
        (names.get(key, ""), key.hex()[:12], each.size, ", ".join(users.get(key, ())))
        for key, each in pool.cache.entries.items()
    ]
    header = ("adapter", "digest", "bytes", "used by")
    return Table("adapters", header, rows, f"{pool.num_held} of {state.config.max_loras} places held")


def request_view(state: State, name: str) -> Text:
    """Return a text about a live request in the state."""
    req_state = state.requests[name]
    request, row = req_state.request, req_state.row
    known = len(state.known_tokens(req_state))
    lines = [
        f"request {name}, arrival {req_state.arrival}, priority {request.priority}",
        f"{req_state.num_prompt} prompt tokens, {known - req_state.num_prompt} of at most "
        f"{request.sampling.max_tokens} answer tokens",
    ]
    if row == NO_ROW:
        lines.append("waits" + (", preempted before" if req_state.preempted else ""))
    else:
        blocks = state.block_table[row, : state.num_blocks[row]].tolist()
        lines.append(f"runs in row {row} since step {req_state.admitted_step}")
        lines.append(f"{int(state.num_computed[row])} tokens computed, blocks {blocks}")
        for group, table in enumerate(state.windows.tables[:, row], 1):
            first = int(state.windows.first_held[group - 1, row])
            held = table[first : state.num_blocks[row]].tolist()
            lines.append(f"group {group}: blocks {held} from number {first} on")
        if state.num_drafts[row]:
            drafts = state.token_ids[row, known : known + int(state.num_drafts[row])].tolist()
            lines.append(f"drafts {drafts}")
    for index, item in enumerate(request.media):
        held = "held" if index in req_state.held_media else "not held"
        key = req_state.media_keys[index].hex()[:16]
        lines.append(f"item {index}: {item.modality}, {item.num_embeds} embeddings, entry {key}, {held}")
    flags = {"waits for its grammar": req_state.waits_for_grammar, "cancelled": bool(req_state.cancelled)}
    lines += [text for text, is_set in flags.items() if is_set]
    return Text(lines)


def state_view(state: State) -> Text:
    """Return a text with the state's counters."""
    config, pool = state.config, state.blocks
    cached = int(np.count_nonzero(_cached(state)[pool.free_list.order()]))
    lines = [
        f"step {state.step}{', open' if state.is_open else ''}, {len(state.flights)} steps in flight",
        f"{len(state.running)} running, {len(state.waiting)} waiting, {state.num_arrived} arrived, "
        f"{state.num_preempted} preemptions",
        f"blocks: {pool.num_free} of {pool.num_blocks - 1} free, {cached} of them cached",
        f"encoder cache: {state.encoder.used} of {state.encoder.capacity}, {state.encoder.idle_size} idle",
    ]
    if state.is_open:
        lines.append(f"token budget: {state.tokens_left} of {config.token_budget} left")
    if config.swap_blocks:
        lines.append(f"host blocks: {len(state.free_host_blocks)} of {config.swap_blocks} free")
    if config.num_state_slots:
        lines.append(f"state slots: {state.states.num_free} of {config.num_state_slots} free")
    return Text(lines)


VIEWS: dict[str, Callable[[State], Block]] = {
    "state": state_view,
    "rows": rows_view,
    "blocks": blocks_view,
    "prefix": prefix_view,
    "encoder": encoder_view,
    "sessions": sessions_view,
    "adapters": adapters_view,
}
