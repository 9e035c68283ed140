"""The only writer of state: applies an event. It makes no choices and never fails on a log that
`verify` accepts; what an event means is said here and nowhere else."""

from collections.abc import Callable

import numpy as np

from mmengine.core.blocks import block_extras, blocks_needed, content_windows
from mmengine.core.prefix_index import NO_CONTENT, ROOT
from mmengine.core.request_state import RequestState
from mmengine.core.state import BROKEN, LOST, NEVER, RUNS_ON, STOPPED, State
from mmengine.events import vocabulary as ev
from mmengine.request import Request


def evolve(state: State, event: ev.Event) -> None:
    _APPLY[type(event)](state, event)


def _started(state: State, event: ev.Started) -> None:
    """The state was made from this event; there is nothing to add."""


def _queued(state: State, event: ev.Queued) -> None:
    request = Request(
        request_id=event.request_id,
        prompt_token_ids=np.frombuffer(event.prompt, np.int32),
        sampling=event.sampling,
        media=event.media,
        sample_index=event.sample_index,
        priority=event.priority,
        cache_salt=event.cache_salt,
        deadline_ns=event.deadline_ns,
        grammar=event.grammar,
    )
    known = state.new_request(request)
    known.waits_for_grammar = request.grammar is not None
    state.requests[event.request_id] = known
    state.history.update(event.prompt)
    state.enqueue(known)


def _grammar_ready(state: State, event: ev.GrammarReady) -> None:
    state.requests[event.request_id].waits_for_grammar = False


def _grammar_failed(state: State, event: ev.GrammarFailed) -> None:
    known = state.requests[event.request_id]
    known.detail = event.detail
    state.grammar_failed.append(event.request_id)


def _cancelled(state: State, event: ev.Cancelled) -> None:
    state.requests[event.request_id].cancelled = event.reason
    state.cancelled.append(event.request_id)


def _scheduled(state: State, event: ev.Scheduled) -> None:
    state.is_open = True
    rows = state.last_rows if event.rows is None else np.frombuffer(event.rows, np.int32)
    if event.num_tokens is None:
        num_tokens = np.ones(len(rows), np.int32)
    else:
        num_tokens = np.frombuffer(event.num_tokens, np.int32)
    _encode(state, event.encode, event.evict)
    _deal_blocks(state, rows, num_tokens, np.frombuffer(event.new_blocks, np.int32))
    state.step_rows = rows
    if event.num_drafts is not None:
        state.scheduled_drafts[rows] = np.frombuffer(event.num_drafts, np.int32)
    if state.config.num_draft_tokens:
        state.num_drafts[rows] = 0
    _compute(state, rows, num_tokens)


def _admitted(state: State, event: ev.Admitted) -> None:
    state.is_open = True
    known = state.requests[event.request_id]
    state.scan_from = state.waiting.index(known)
    del state.waiting[state.scan_from]
    row = event.row
    state.free_rows.remove(row)
    cached = np.frombuffer(event.cached_blocks, np.int32)
    new = np.frombuffer(event.new_blocks, np.int32)
    state.blocks.share(cached)
    state.blocks.take_new(new)
    _fill_row(state, row, known, np.concatenate((cached, new)), len(cached))
    _encode(state, event.encode, event.evict)
    rows = np.array([row], np.int32)
    state.running = np.append(state.running, rows)
    state.step_rows = np.append(state.step_rows, rows)
    _compute(state, rows, np.array([event.num_tokens], np.int32))


def _fill_row(state: State, row: int, known: RequestState, blocks: np.ndarray, num_cached: int) -> None:
    known.row = row
    if known.num_cached < 0:
        known.num_cached = num_cached * state.block_size
    state.requests_by_row[row] = known
    num_tokens = len(known.tokens)
    state.token_ids[row, :num_tokens] = known.tokens
    state.block_table[row, : len(blocks)] = blocks
    state.num_blocks[row] = len(blocks)
    state.num_tokens[row] = num_tokens
    state.num_computed[row] = num_cached * state.block_size
    state.max_total[row] = min(
        known.num_prompt + known.request.sampling.max_tokens, state.config.max_model_len
    )
    state.content[row] = state.blocks.index.content[blocks[num_cached - 1]] if num_cached else ROOT
    state.num_filled[row] = num_cached
    state.num_drafts[row] = state.scheduled_drafts[row] = 0
    state.ended[row] = RUNS_ON
    state.release_at[row] = NEVER
    media = known.request.media
    computed = int(state.num_computed[row])
    ahead = [start for item in media for start, length in item.runs if start + length > computed]
    state.next_media[row] = min(ahead, default=NEVER)
    salted = state.block_size if known.request.cache_salt else 0
    state.plain_from[row] = max((item.end for item in media), default=salted)


def _deal_blocks(state: State, rows: np.ndarray, num_tokens: np.ndarray, new: np.ndarray) -> None:
    """Hand `new` to the rows in order, to each as many as its tokens need."""
    if not len(new):
        return
    state.blocks.take_new(new)
    held = state.num_blocks[rows]
    needed = blocks_needed(state, rows, num_tokens)
    places = np.repeat(held + needed - np.cumsum(needed), needed) + np.arange(len(new))
    state.block_table[np.repeat(rows, needed), places] = new
    state.num_blocks[rows] = held + needed


def _encode(state: State, encode: tuple[tuple[bytes, int, int], ...], evict: tuple[bytes, ...]) -> None:
    for key in evict:
        state.encoder.evict(key)
    for key, row, index in encode:
        size = state.requests_by_row[row].request.media[index].num_embeds
        state.encoder.add(key, size)
        state.encoder_left -= size
        state.step_encoded.append(key)


def _compute(state: State, rows: np.ndarray, num_tokens: np.ndarray) -> None:
    """The rows' tokens count as computed from here on; full blocks become hits at once."""
    before = state.num_computed[rows]
    after = before + num_tokens
    state.num_computed[rows] = after
    state.scheduled[rows] = num_tokens
    state.tokens_left -= int(num_tokens.sum())
    if state.config.enable_prefix_caching:
        spare = state.content_width - state.block_size
        filled = np.minimum(after, state.num_tokens[rows] - spare) // state.block_size
        fills = filled > state.num_filled[rows]
        if fills.any():
            _fill_blocks(state, rows[fills], filled[fills])
    for row in rows[state.next_media[rows] < after + bool(state.config.lookahead_tokens)].tolist():
        _reference_media(state, row)


def _fill_blocks(state: State, rows: np.ndarray, filled: np.ndarray) -> None:
    """Record the content of blocks that become full, up to `filled` blocks of each row. Rows that
    fill one plain block go together; the others go block by block."""
    size, first = state.block_size, state.num_filled[rows]
    single = (filled - first == 1) & (first * size >= state.plain_from[rows])
    state.num_filled[rows] = filled
    fast = single & (state.content[rows] != NO_CONTENT)
    if fast.any():
        some, numbers = rows[fast], first[fast]
        blocks = state.block_table[some, numbers]
        places = (numbers * size)[:, None] + np.arange(state.content_width, dtype=np.int32)
        tokens = state.token_ids[some[:, None], places]
        state.content[some] = state.blocks.index.insert_many(blocks, state.content[some], tokens)
        state.step_filled.append(blocks)
    spans = np.stack((rows, first, filled), axis=1)[~single]
    for row, start, end in spans.tolist():
        _fill_row_blocks(state, row, start, end)


def _fill_row_blocks(state: State, row: int, first: int, last: int) -> None:
    size, index = state.block_size, state.blocks.index
    tokens = content_windows(state.token_ids[row], first, last, size, state.content_width)
    parts = index.token_parts(tokens).tolist()
    extras = block_extras(state.requests_by_row[row].request, last * size, size)
    content = int(state.content[row])
    for place, number in enumerate(range(first, last)):
        if content == NO_CONTENT:
            break
        block = int(state.block_table[row, number])
        content = index.insert(block, content, parts[place], tokens[place], extras.get(number, b""))
    state.content[row] = content
    state.step_filled.append(state.block_table[row, first:last].copy())


def _reference_media(state: State, row: int) -> None:
    """The row's chunk overlaps embeddings: hold what it uses, find what comes next."""
    known = state.requests_by_row[row]
    computed = int(state.num_computed[row])
    read = computed + bool(state.config.lookahead_tokens)  # a drafter reads one token ahead
    before = computed - int(state.scheduled[row])
    next_start, release_at = int(NEVER), int(NEVER)
    for index, item in enumerate(known.request.media):
        for start, length in item.runs:
            reached = start < computed or (start < read and state.encoder.has(known.media_keys[index]))
            if reached and start + length > before and index not in known.held_media:
                known.held_media.add(index)
                state.encoder.reference(known.media_keys[index])
            if start + length > computed:
                next_start = min(next_start, start)
        if index in known.held_media:
            release_at = min(release_at, item.end)
    state.next_media[row] = next_start
    state.release_at[row] = release_at


def _release_media(state: State, row: int, computed: int) -> None:
    """Drop references to items whose embeddings are all computed."""
    known = state.requests_by_row[row]
    release_at = int(NEVER)
    for index in sorted(known.held_media):
        end = known.request.media[index].end
        if end <= computed:
            known.held_media.discard(index)
            state.encoder.release(known.media_keys[index])
        else:
            release_at = min(release_at, end)
    state.release_at[row] = release_at


def _close_step(state: State) -> np.ndarray:
    """The open step is over; gives its rows."""
    rows = state.step_rows
    state.encoder.dropped.clear()
    state.last_rows = rows
    state.scheduled[rows] = 0
    state.step += 1
    state.reset_step()
    return rows


def _executed(state: State, event: ev.Executed) -> None:
    rows = _close_step(state)
    state.history.update(event.token_ids)
    sampled = rows[state.num_computed[rows] >= state.num_tokens[rows]]
    tokens = np.frombuffer(event.token_ids, np.int32)
    counts = None if event.counts is None else np.frombuffer(event.counts, np.int32)
    for index, what in event.errors:
        state.ended[sampled[index]] = BROKEN
        state.requests_by_row[sampled[index]].detail = what
    for index, kind in event.stops:
        row = sampled[index]
        count = 1 if counts is None else counts[index]
        if state.num_tokens[row] + count <= state.max_total[row]:  # else the limit comes first
            state.ended[row] = STOPPED
            state.requests_by_row[row].detail = kind
    if counts is None:
        whole = sampled
        if event.errors:
            sound = state.ended[sampled] != BROKEN
            whole, tokens = sampled[sound], tokens[sound]
        state.token_ids[whole, state.num_tokens[whole]] = tokens
        state.num_tokens[whole] += 1
    else:
        _take_runs(state, sampled, tokens, counts)
    if state.config.num_draft_tokens:
        state.num_computed[sampled] = state.num_tokens[sampled] - 1  # rejected drafts are rolled back
        _take_drafts(state, rows, sampled, event)
    for row in rows[state.release_at[rows] <= state.num_computed[rows]].tolist():
        _release_media(state, row, int(state.num_computed[row]))


def _take_runs(state: State, rows: np.ndarray, tokens: np.ndarray, counts: np.ndarray) -> None:
    """Append several tokens to each row, as many as its limit allows."""
    places = np.arange(len(tokens), dtype=np.int32) - np.repeat(np.cumsum(counts) - counts, counts)
    places += np.repeat(state.num_tokens[rows], counts)
    owners = np.repeat(rows, counts)
    kept = (places < state.max_total[owners]) & (state.ended[owners] != BROKEN)
    state.token_ids[owners[kept], places[kept]] = tokens[kept]
    whole = state.ended[rows] != BROKEN
    rows, counts = rows[whole], counts[whole]
    state.num_tokens[rows] = np.minimum(state.num_tokens[rows] + counts, state.max_total[rows])


def _take_drafts(state: State, rows: np.ndarray, sampled: np.ndarray, event: ev.Executed) -> None:
    """Put drafts behind the known tokens."""
    state.scheduled_drafts[rows] = 0
    if event.num_drafts is None:
        return
    num_drafts = np.frombuffer(event.num_drafts, np.int32)
    drafts = np.frombuffer(event.drafts, np.int32)
    places = np.arange(len(drafts), dtype=np.int32) - np.repeat(
        np.cumsum(num_drafts) - num_drafts, num_drafts
    )
    places += np.repeat(state.num_tokens[sampled], num_drafts)
    state.token_ids[np.repeat(sampled, num_drafts), places] = drafts
    state.num_drafts[sampled] = num_drafts
    state.drafter[sampled] = 0 if event.drafters is None else np.frombuffer(event.drafters, np.int32)


def _failed(state: State, event: ev.Failed) -> None:
    for blocks in state.step_filled:
        state.blocks.index.forget(blocks)
    encoded, dropped = state.step_encoded, state.encoder.dropped.copy()
    rows = _close_step(state)
    state.encoder.dropped += dropped  # whether the failed step dropped them, nobody knows
    for key in encoded:
        state.encoder.invalidate(key)
    for row in rows.tolist():
        known = state.requests_by_row[row]
        known.failures += 1
        known.detail = event.error
        state.ended[row] = LOST


def _preempted(state: State, event: ev.Preempted) -> None:
    known = state.requests_by_row[event.row]
    known.tokens = state.token_ids[event.row, : state.num_tokens[event.row]].copy()
    for_room = state.ended[event.row] != LOST and not state.resetting
    _leave_row(state, known)
    state.enqueue(known)
    state.preempted_in_step |= for_room
    state.resetting = state.resetting and bool(len(state.running))


def _finished(state: State, event: ev.Finished) -> None:
    known = state.requests.pop(event.request_id, None)
    if known is None:
        return  # refused before it was queued
    if known.row < 0:
        state.waiting.remove(known)
    else:
        if state.ended[known.row] == BROKEN:  # its KV may hold NaN: nobody shall hit it
            state.blocks.index.forget(state.block_table[known.row, : state.num_blocks[known.row]])
        _leave_row(state, known)
    for names in (state.cancelled, state.grammar_failed):
        if event.request_id in names:
            names.remove(event.request_id)


def _leave_row(state: State, known: RequestState) -> None:
    row = known.row
    for index in sorted(known.held_media):
        state.encoder.release(known.media_keys[index])
    known.held_media.clear()
    state.blocks.release(state.block_table[row, : state.num_blocks[row]])
    state.num_blocks[row] = 0
    state.running = state.running[state.running != row]
    state.requests_by_row[row] = None
    state.free_rows.append(row)
    known.row = -1


def _delivered(state: State, event: ev.Delivered) -> None:
    """A finished request is forgotten already."""


def _cache_reset(state: State, event: ev.CacheReset) -> None:
    state.blocks.reset_cache()
    state.content[state.running] = NO_CONTENT
    state.resetting = event.preempt_running


def _checkpoint(state: State, event: ev.Checkpoint) -> None:
    """A digest says something of the state and changes nothing."""


_APPLY: dict[type[ev.Event], Callable[[State, ev.Event], None]] = {
    ev.Started: _started,
    ev.Queued: _queued,
    ev.GrammarReady: _grammar_ready,
    ev.GrammarFailed: _grammar_failed,
    ev.Cancelled: _cancelled,
    ev.Preempted: _preempted,
    ev.Scheduled: _scheduled,
    ev.Admitted: _admitted,
    ev.Executed: _executed,
    ev.Failed: _failed,
    ev.Finished: _finished,
    ev.Delivered: _delivered,
    ev.CacheReset: _cache_reset,
    ev.Checkpoint: _checkpoint,
}
