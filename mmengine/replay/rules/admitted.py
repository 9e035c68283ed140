"""The rules for the decision ADMITTED: the request, its row, its prefix hits and its blocks."""

import numpy as np

from mmengine.core.state.blocks import block_extras, content_windows
from mmengine.core.state.request_state import RequestState
from mmengine.core.state.state import State
from mmengine.core.state.uniform_window import num_skipped, with_skipped
from mmengine.events import vocabulary as ev
from mmengine.replay.findings import BrokenRule
from mmengine.replay.rules.common import (
    Rules,
    check_encoder_work,
    check_new_blocks,
    check_token_budget,
    int32_column,
    out_of_range,
)


def check_admitted(state: State, event: ev.Admitted) -> Rules:
    config, name = state.config, event.request_id
    cached, new = (
        int32_column("cached_blocks", event.cached_blocks),
        int32_column("new_blocks", event.new_blocks),
    )
    req_state, width = state.requests.get(name), state.block_table.shape[1]
    if req_state is None or req_state.row >= 0:
        place = "it is not live" if req_state is None else f"it has row {req_state.row} already"
        text = f"step {state.step} admits request {name!r:.80}, but {place}"
        yield BrokenRule("queue", text, 0, 1, can_fold=False)
        return
    if event.row not in state.free_rows:
        text = f"step {state.step} admits request {name!r:.80} to row {event.row}, which is not free"
        yield BrokenRule("rows", text, event.row, config.num_rows - 1, can_fold=False)
        return
    start = len(cached) * state.block_size if event.num_computed == ev.AS_CACHED else event.num_computed
    reach, most = start + event.num_tokens, state.token_ids.shape[1]
    for rules in (
        out_of_range("blocks", "cached_blocks", cached, 1, config.num_blocks),
        out_of_range("blocks", "new_blocks", new, 1, config.num_blocks),
    ):
        if (broken := next(rules, None)) is not None:
            yield broken
            return
    if state.config.block_groups:
        problem = _wrong_groups(state, cached, new, start)
        if problem is not None:
            text = f"request {name!r:.80} starts with {problem}"
            yield BrokenRule("blocks", text, len(cached), len(new), can_fold=False)
            return
        hits = start // state.block_size
        yield from check_new_blocks(state, new[~np.isin(new, cached)])
        if state.num_groups > 1:
            yield from _window_hits(state, event, cached, start)
            cached, new = cached[:hits], new[:: state.num_groups]
        else:
            cached = with_skipped(state.config, cached, start)
    if event.num_tokens < 1 or start < 0 or reach > most or len(cached) + len(new) > width:
        text = f"request {name!r:.80} starts after {start} tokens with {event.num_tokens} tokens in "
        text += f"{len(cached) + len(new)} blocks; a row holds {most} tokens in {width} blocks"
        yield BrokenRule("computed", text, reach, most, can_fold=False)
        return
    yield from check_token_budget(state, event.num_tokens)
    yield from _hits(state, event, req_state, cached, start)
    yield from _first_tokens(state, event, req_state, reach, len(cached) + len(new))
    yield from check_new_blocks(state, new[~np.isin(new, cached)] if len(cached) else new)
    if both := int(np.isin(new, cached).sum()):
        text = f"request {name!r:.80} starts with {both} blocks as prefix hits and as new blocks"
        yield BrokenRule("blocks", text, both, 0)
    yield from check_encoder_work(state, event, req_state)
    if isinstance(event, ev.AdmittedWithState):
        yield from _state_slot(state, event)


def _hits(state: State, event: ev.Admitted, req_state: RequestState, cached: np.ndarray, start: int) -> Rules:
    """Check the number and the contents of the prefix hits, and the number of computed tokens."""
    size, name = state.block_size, event.request_id
    if not state.constants.knows_contents:
        return
    skipped = num_skipped(state.config, start)
    if (twice := len(cached) - skipped - len(np.unique(cached[skipped:]))) > 0:
        text = f"request {name!r:.80} starts with {len(cached)} prefix hits, {twice} of them counted twice"
        yield BrokenRule("hits", text, len(cached), len(cached) - twice)
    hit = len(cached) * size
    most = hit + (0 if event.copy is None else size - 1)
    if event.swap_in:
        most = max(hit, req_state.num_swapped)
    if start > most:
        text = f"request {name!r:.80} starts with {start} computed tokens, but its prefix hits hold {most}"
        yield BrokenRule("hits", text, start, most)
    # A request with a `group` shares blocks with an earlier request; these blocks need not be cached.
    if req_state.request.group or not len(cached):
        return
    known = min(len(cached), (len(req_state.tokens) + size - state.content_width) // size)
    tokens = content_windows(req_state.tokens, 0, known, size, state.content_width)
    ahead, whole_prompt = state.constants.media_ahead, state.config.whole_prompt
    extras = block_extras(req_state.request, 0, known, size, ahead, whole_prompt)
    found = state.blocks.find_first(tokens, extras)
    is_same = found == cached[: len(found)]
    is_same[:skipped] = True
    same = int(np.cumprod(is_same).sum())
    if same < len(cached):
        text = f"request {name!r:.80} starts with {len(cached)} prefix hits, but {same} of these blocks hold "
        yield BrokenRule("hits", text + "its prefix", len(cached), same)


def _wrong_groups(state: State, cached: np.ndarray, new: np.ndarray, start: int) -> str | None:
    """Return why the blocks do not form a table for each block group, or None if they do."""
    size, groups = state.block_size, state.num_groups
    is_whole = not start % size or not state.constants.knows_contents
    if not 0 <= start < state.block_table.shape[1] * size or not is_whole:
        return f"{start} computed tokens, which are not whole blocks in a row's table"
    hits = start // size
    expected = hits * groups - int(state.windows.first_needed(start).sum()) - num_skipped(state.config, start)
    if len(cached) != expected:
        return f"{len(cached)} prefix hits in {groups} block groups; {start} computed tokens need {expected}"
    if len(new) % groups or hits + len(new) // groups > state.block_table.shape[1]:
        most = state.block_table.shape[1]
        return f"{len(new)} new blocks in {groups} block groups, of which each has at most {most}"
    return None


def _window_hits(state: State, event: ev.Admitted, cached: np.ndarray, start: int) -> Rules:
    """Check that prefix hits in window groups have the same contents as the first group's hits. `start`: the
    number of tokens in the first group's hits.
    """
    if not state.constants.knows_contents:
        return
    hits = place = start // state.block_size
    first = state.windows.first_needed(start)[:, 0].tolist()
    low = min(first)
    found = state.blocks.find_windows(state.blocks.window_content[cached[low:hits]])
    for group, number in enumerate(first):
        own = cached[place : place + hits - number]
        place += len(own)
        same = int((found[group, number - low :] == own).sum())
        if same < len(own):
            text = f"request {event.request_id!r:.80} starts with {len(own)} prefix hits in group "
            text += f"{group + 1}, but {same} of these blocks hold its prefix"
            yield BrokenRule("hits", text, len(own), same)


def _first_tokens(
    state: State, event: ev.Admitted, req_state: RequestState, reach: int, num_blocks: int
) -> Rules:
    name, padding = event.request_id, reach - len(req_state.tokens)
    if padding > state.config.num_draft_tokens:
        text = f"request {name!r:.80} computes {reach} tokens, but only {len(req_state.tokens)} are known"
        yield BrokenRule("computed", text, reach, len(req_state.tokens))
    if reach > num_blocks * state.block_size:
        text = f"request {name!r:.80} computes {reach} tokens, but its {num_blocks} blocks hold "
        limit = num_blocks * state.block_size
        yield BrokenRule("computed", text + str(limit), reach, limit)


def _state_slot(state: State, event: ev.AdmittedWithState) -> Rules:
    count = state.config.num_state_slots
    if not count:
        return
    if not 0 <= event.state_slot < count or not ev.NO_STATE <= event.state_from < count:
        text = f"the row gets state slot {event.state_slot} from slot {event.state_from}; {count} slots exist"
        yield BrokenRule("state_slots", text, event.state_slot, count - 1, can_fold=False)
    elif state.states.held[event.state_slot]:
        text = f"request {event.request_id!r:.80} gets state slot {event.state_slot}, which another row holds"
        yield BrokenRule("state_slots", text, event.state_slot, count - 1)
