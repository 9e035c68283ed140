"""Applies events to rows of the batch: assigns rows to requests, adds blocks and tokens, frees rows."""

from collections.abc import Iterable

import numpy as np

from mmengine.core.executor import PADDING
from mmengine.core.fold.media import next_media, reference_media
from mmengine.core.fold.states import release_state
from mmengine.core.fold.windows import fill_lazy_windows, fill_windows, release_blocks
from mmengine.core.state.blocks import block_extras, further_blocks
from mmengine.core.state.columns import BROKEN, LEFT, NEVER, RUNS_ON, frozen
from mmengine.core.state.flight import Flight
from mmengine.core.state.goodput import Goodput
from mmengine.core.state.overlap import runs_ahead_to
from mmengine.core.state.prefix_index import NO_CONTENT, ROOT
from mmengine.core.state.request_state import NEVER_RAN, NO_ROW, RequestState
from mmengine.core.state.state import State
from mmengine.events import vocabulary as ev
from mmengine.ragged import counting


def drop_host_blocks(state: State, req_state: RequestState) -> None:
    """Free the host blocks that hold the request's swapped KV."""
    if len(req_state.host_blocks):
        state.free_host_blocks = np.concatenate((state.free_host_blocks, req_state.host_blocks[::-1]))
    req_state.host_blocks, req_state.num_swapped = req_state.host_blocks[:0], 0


def fill_row(
    state: State, row: int, req_state: RequestState, blocks: np.ndarray, num_cached: int, computed: int
) -> None:
    """Copy the request's tokens and `blocks` into the row. `num_cached`: the number of blocks that are prefix
    cache hits. `computed`: the number of tokens with KV.
    """
    req_state.row, req_state.admitted_step = row, state.step
    if req_state.num_cached == NEVER_RAN:
        req_state.num_cached = min(computed, req_state.num_prompt)
    state.requests_by_row[row] = req_state
    num_tokens = len(req_state.tokens)
    state.token_ids[row, :num_tokens] = req_state.tokens
    state.block_table[row, : len(blocks)] = blocks
    state.num_blocks[row] = len(blocks)
    state.num_tokens[row] = num_tokens
    state.num_computed[row] = computed
    state.max_total[row] = min(
        req_state.num_prompt + req_state.request.sampling.max_tokens, state.config.max_model_len
    )
    state.content[row] = state.blocks.index.content[blocks[num_cached - 1]] if num_cached else ROOT
    state.num_filled[row] = num_cached
    state.num_drafts[row] = state.scheduled_drafts[row] = 0
    if state.goodput is not None:
        state.goodput.admit(row)
    state.ended[row] = RUNS_ON
    state.runs_ahead_to[row] = runs_ahead_to(state, row, req_state.request)
    state.release_at[row] = NEVER
    media = req_state.request.media
    state.num_with_media += bool(media)
    state.num_prefills += req_state.request.is_prefill
    state.next_media[row] = next_media(media, computed)
    rooted = req_state.request.cache_salt or req_state.request.adapter is not None
    rooted = rooted or state.config.whole_prompt
    salted = state.block_size if rooted else 0
    state.plain_from[row] = media[-1].end if media else salted


def deal_blocks(
    state: State, rows: np.ndarray, num_tokens: np.ndarray | int, new: np.ndarray, counts: bytes | None
) -> None:
    """Distribute the blocks `new` to the rows in order.

    Each row gets enough blocks for its next `num_tokens` tokens. `num_tokens`: an array, or a number for all
    rows. `counts`: each row's number of new blocks as int32, if known. With several block groups, a row gets
    the same number of blocks in each group.
    """
    state.blocks.take_new(new)
    if counts is None:
        short, further = further_blocks(state, state.config, rows, num_tokens)
    else:
        further = np.frombuffer(counts, np.int32)
        short = further.nonzero()[0]
        further = further[short]
    rows = rows[short]
    held = state.num_blocks[rows]
    if len(short) * state.num_groups == len(new):  # each row needs one block
        owners, places = rows, held
    else:
        places = np.repeat(held + further - np.cumsum(further), further)
        owners, places = np.repeat(rows, further), places + np.arange(len(places))
    if state.num_groups > 1:
        new = state.windows.deal(owners, places, new)
    state.block_table[owners, places] = new
    state.num_blocks[rows] = held + further


def compute(state: State, rows: np.ndarray, num_tokens: np.ndarray | int) -> None:
    """Count the rows' next `num_tokens` tokens as computed. Full blocks become available for prefix cache
    hits.

    `num_tokens`: an array, or a number for all rows.
    """
    after = state.num_computed[rows] + num_tokens
    state.num_computed[rows] = after
    state.scheduled[rows] = num_tokens
    state.tenants.charge(rows, num_tokens)
    state.tokens_left -= num_tokens * len(rows) if isinstance(num_tokens, int) else int(num_tokens.sum())
    if state.config.enable_prefix_caching:
        full = after // state.block_size
        ripe = (full > state.num_filled[rows]).nonzero()[0]
        if len(ripe):
            _fill_blocks(state, rows[ripe], full[ripe])
    if state.num_with_media:
        for row in rows[state.next_media[rows] < after + bool(state.config.lookahead_tokens)].tolist():
            reference_media(state, row)


def fill_with_result(state: State, rows: np.ndarray) -> None:
    """Record the contents of blocks that became full. `rows`: the rows with new tokens, intp."""
    if not state.config.enable_prefix_caching:
        return
    rows = rows[state.ended[rows] < BROKEN]
    full = (state.num_tokens[rows] - 1) // state.block_size
    ripe = full > state.num_filled[rows]
    if ripe.any():
        _fill_blocks(state, rows[ripe], full[ripe])


def fill_before_error(state: State, sampled: np.ndarray, event: ev.Executed) -> None:
    """Record the contents of blocks that became full with tokens that a grammar then rejected. vLLM caches
    these blocks too. `num_tokens` does not include the rejected tokens.

    `sampled`: the step's rows with new tokens, intp.
    """
    if not state.config.enable_prefix_caching:
        return
    tokens = np.frombuffer(event.token_ids, np.int32)
    counts = (
        np.ones(len(sampled), np.int32) if event.counts is None else np.frombuffer(event.counts, np.int32)
    )
    ends = np.cumsum(counts)
    for index, _ in event.errors:
        row, count = sampled[index], counts[index]
        if state.ended[row] != BROKEN:
            continue
        before = state.num_tokens[row]
        after = min(before + count, state.max_total[row])
        first = ends[index] - count
        state.token_ids[row, before:after] = tokens[first : first + after - before]
        rows, full = np.array([row]), np.array([(after - 1) // state.block_size])
        if full[0] > state.num_filled[row]:
            state.num_tokens[row] = after
            _fill_blocks(state, rows, full)
            state.num_tokens[row] = before


def _fill_blocks(state: State, rows: np.ndarray, full: np.ndarray) -> None:
    """Record the contents of each row's first `full` blocks.

    Rows with only one new full block, without media, salt or adapter in the block's hash (`plain_from`), are
    processed together, which is faster. All other rows are processed one by one. If there are other rows and
    `fills_in_row_order` is set, all rows are processed one by one.
    """
    config, size, first = state.config, state.block_size, state.num_filled[rows]
    if config.num_draft_tokens or config.lookahead_tokens or config.max_in_flight > 1:
        # Blocks that contain drafts or pending tokens are recorded later.
        req_state = state.num_tokens[rows] - (state.content_width - size)
        full = np.minimum(full, req_state // size)
        some = full > first
        rows, first, full = rows[some], first[some], full[some]
    state.num_filled[rows] = full
    plain = (full - first == 1) & (first * size >= state.plain_from[rows])
    if state.constants.fills_in_row_order:
        plain &= plain.all()
    others: Iterable[tuple[int, int, int]] = ()
    if np.count_nonzero(plain) < len(rows):
        slow = ~plain
        others = zip(rows[slow].tolist(), first[slow].tolist(), full[slow].tolist(), strict=True)
        rows, first = rows[plain], first[plain]
    if len(rows):
        blocks = state.block_table[rows, first]
        tokens = state.block_tokens[rows, first]
        contents = state.blocks.index.insert_many(blocks, state.content[rows], tokens)
        state.content[rows] = contents
        state.step_filled.append(blocks)
        if state.has_lazy_windows:
            for row, number in zip(rows.tolist(), first.tolist(), strict=True):
                fill_lazy_windows(state, row, number, number + 1, {})
        elif state.num_groups > 1:
            fill_windows(state, state.windows.tables[:, rows, first], contents)
    for row, start, end in others:
        _fill_row_blocks(state, row, start, end)


def _fill_row_blocks(state: State, row: int, first: int, last: int) -> None:
    content, blocks = int(state.content[row]), state.block_table[row, first:last].copy()
    if content != NO_CONTENT:
        request = state.requests_by_row[row].request
        ahead, whole_prompt = state.constants.media_ahead, state.config.whole_prompt
        extras = block_extras(request, first, last, state.block_size, ahead, whole_prompt)
        extras = {number - first: extra for number, extra in extras.items()}
        tokens = state.block_tokens[row, first:last]
        state.content[row] = state.blocks.index.insert_chain(blocks, content, tokens, extras)
        if state.has_lazy_windows:
            fill_lazy_windows(state, row, first, last, extras)
        elif state.num_groups > 1:
            contents = state.blocks.content[blocks]
            fill_windows(state, state.windows.tables[:, row, first:last].copy(), contents)
    state.step_filled.append(blocks)


def take_runs(state: State, rows: np.ndarray, tokens: np.ndarray, counts: np.ndarray) -> None:
    """Append the next `counts` tokens in `tokens` to each row, up to the row's length limit."""
    places = counting(counts) + np.repeat(state.num_tokens[rows], counts)
    owners = np.repeat(rows, counts)
    kept = (places < state.max_total[owners]) & (state.ended[owners] < BROKEN)
    state.token_ids[owners[kept], places[kept]] = tokens[kept]
    whole = state.ended[rows] < BROKEN
    rows, counts = rows[whole], counts[whole]
    state.num_tokens[rows] = np.minimum(state.num_tokens[rows] + counts, state.max_total[rows])


def take_drafts(state: State, rows: np.ndarray, sampled: np.ndarray, event: ev.Executed) -> None:
    """Write the step's draft tokens into the `sampled` rows, after each row's tokens."""
    if state.verifies:
        state.scheduled_drafts[rows] = 0
        state.verifies = bool(state.scheduled_drafts.any())
    if event.num_drafts is None:
        state.has_drafts = state.has_drafts and bool(state.num_drafts.any())
        return
    num_drafts = np.frombuffer(event.num_drafts, np.int32)
    put_drafts(state, sampled, num_drafts, np.frombuffer(event.drafts, np.int32))
    state.drafter[sampled] = 0 if event.drafters is None else np.frombuffer(event.drafters, np.int32)


def put_drafts(state: State, rows: np.ndarray, num_drafts: np.ndarray, drafts: np.ndarray) -> None:
    """Write `drafts` after the tokens in `rows`. `num_drafts`: each row's number of drafts."""
    state.has_drafts = True
    places = counting(num_drafts) + np.repeat(state.num_tokens[rows], num_drafts)
    state.token_ids[np.repeat(rows, num_drafts), places] = drafts
    state.num_drafts[rows] = num_drafts


def weigh_drafts(state: State, goodput: Goodput, flight: Flight, event: ev.Executed) -> None:
    """Record a step's time and accepted drafts in `goodput`, before the step's tokens are applied."""
    rows, sampled = flight.rows, flight.sampled
    level = flight.draft_level if state.config.max_in_flight > 1 else None
    ns = event.device_ns + event.host_ns
    if goodput.count_step(len(rows), event.counts is not None or bool(event.drafts), ns, level):
        return
    drafts = 0
    if event.counts is not None:
        scheduled = state.scheduled_drafts[sampled]
        drafts = int(scheduled.sum())
        if drafts:
            goodput.judge(sampled, state.drafter[sampled], scheduled, event.counts)
    of_prompts = flight.num_tokens - drafts - len(sampled)
    only_decodes = len(sampled) == len(rows) and not (of_prompts or flight.encoded or flight.part_of)
    tokens, made = len(event.token_ids) // 4, len(event.drafts) // 4
    reading_ns = event.draft_ns * of_prompts // max(flight.num_tokens, 1)
    goodput.record_step(rows, drafts, tokens, made, ns, only_decodes, level, reading_ns)


def swap_out(state: State, req_state: RequestState, host_blocks: np.ndarray) -> None:
    """Schedule a copy of the request's KV to `host_blocks` in the open step."""
    state.free_host_blocks = state.free_host_blocks[~np.isin(state.free_host_blocks, host_blocks)]
    req_state.host_blocks, req_state.num_swapped = host_blocks, int(state.num_computed[req_state.row])
    pairs = np.stack((state.block_table[req_state.row, : len(host_blocks)], host_blocks), axis=1)
    state.step_copies["swap_out"].append(pairs)
    state.step_swapped.append(req_state)


def leave_row(state: State, req_state: RequestState) -> None:
    """Take the row, its blocks and its encoder outputs from the request. They become free when neither the
    open step nor a step in flight computes the row. With `frees_at_once`, the blocks and encoder outputs
    become free now, and only the row waits for the step.
    """
    row = req_state.row
    keys = [req_state.media_keys[index] for index in sorted(req_state.held_media)]
    req_state.held_media.clear()
    state.release_at[row] = NEVER
    state.num_with_media -= bool(req_state.request.media)
    state.num_prefills -= req_state.request.is_prefill
    state.running = frozen(state.running[state.running != row])
    was_resetting, state.resetting = state.resetting, state.resetting and len(state.running) > 0
    state.requests_by_row[row] = None
    req_state.row = NO_ROW
    if not (state.in_flight[row] or state.is_open and (state.step_rows == row).any()):
        _free_row(state, row, keys)
    else:
        state.ended[row] = LEFT
        if state.constants.frees_at_once:
            _let_go(state, row, keys)
            keys = []
        state.leaving[row] = keys
    if was_resetting and not state.resetting and state.constants.frees_at_once:
        state.blocks.reset_cache()


def free_rows_left(state: State) -> None:
    """Free the rows that requests have left and that no step in flight computes."""
    for row in [row for row in state.leaving if not state.in_flight[row]]:
        _free_row(state, row, state.leaving.pop(row))


def _free_row(state: State, row: int, keys: list[bytes]) -> None:
    _let_go(state, row, keys)
    state.max_total[row], state.ended[row] = NEVER, RUNS_ON
    state.free_rows.append(row)


def _let_go(state: State, row: int, keys: list[bytes]) -> None:
    """Release the row's blocks, its state slot, its adapter, and the encoder outputs `keys`."""
    for key in keys:
        state.encoder.release(key)
    release_blocks(state, row)
    if state.config.num_state_slots:
        release_state(state, row)
    state.adapters.release(row)
    state.block_table[row, : state.num_blocks[row]] = 0
    state.num_blocks[row] = 0


def leave_step(state: State, req_state: RequestState) -> None:
    """Remove a preempted row from the open step, and return its tokens and embeddings to the step's budgets,
    although the step still encodes the row's media items.
    """
    row = req_state.row
    state.step_rows = frozen(state.step_rows[state.step_rows != row])
    state.tokens_left += int(state.scheduled[row])
    state.scheduled[row] = state.scheduled_drafts[row] = 0
    state.encoder_left += sum(
        request.media[index].num_embeds
        for _, request, index in state.step_encoded
        if request is req_state.request
    )


def make_room(state: State, event: ev.Preempted) -> None:
    """After a preemption for `event.for_row`, count only the rows before `event.for_row` as scheduled.

    Call before the preempted row leaves.
    """
    running = state.running.tolist()
    place = running.index(event.for_row)
    state.made_room_for = (event.for_row, event.for_tokens)
    state.num_decided = place - (running.index(event.row) < place)


def pad_drafts(state: State, row: int, count: int) -> None:
    """Write `count` placeholders as drafts after the row's tokens. Placeholders equal no token, so they are
    never accepted.
    """
    first = state.num_tokens[row]
    state.token_ids[row, first : first + count] = PADDING
    state.scheduled_drafts[row] = count
    state.verifies = True
