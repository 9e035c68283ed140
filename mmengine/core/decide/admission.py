"""Which waiting request starts next, and on what: prefix hits, a shared prompt, blocks of the host."""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from msgspec.structs import asdict

from mmengine.core.decide.adapter_places import AdapterPlaces
from mmengine.core.decide.encoder_draft import EncoderDraft
from mmengine.core.decide.fetch import PASSED, Passed, fetched
from mmengine.core.decide.leases import taken_back
from mmengine.core.state.adapters import digest_of
from mmengine.core.state.blocks import block_extras, content_windows, media_ahead, threshold_of
from mmengine.core.state.prefix_index import NO_BLOCK
from mmengine.core.state.reading import RequestView
from mmengine.core.state.request_state import NO_ROW, SETTLED, RequestState
from mmengine.core.state.view import View
from mmengine.events import vocabulary as ev
from mmengine.request import Request


class Start(NamedTuple):
    """Where a waiting request can start: blocks it shares, tokens whose KV is there or comes with a
    copy, a block to copy from or NO_BLOCK, whether its own blocks come back from the host. Where rows have
    recurrent states: the slot that holds the one behind the shared blocks, and how many tokens stand in
    blocks that it could share if there were states behind all of them."""

    cached: np.ndarray
    num_computed: int
    copy_from: int = NO_BLOCK
    swap_in: bool = False
    state_from: int = ev.NO_STATE
    num_shared: int = 0


def admit_next(
    view: View, may_start: Callable[[RequestView], bool] | None = None
) -> ev.Admitted | ev.Evicted | ev.Fetched | ev.LeaseTaken | None:
    """The first waiting request that can start, of those that `may_start` where that is given; FETCHED where
    a store has more of its beginning than is here. One that waits for its grammar, for a store, for a place
    of its adapter, for the encoder, or for the prefill that it shares is passed over; one whose blocks do not
    fit holds back those behind it."""
    if not view.free_rows or view.tokens_left <= 0 or (view.preempted_in_step and len(view.running)):
        return None
    if view.config.num_state_slots and not view.states.num_free:
        return None
    places = AdapterPlaces(view, may_start) if view.config.max_loras else None
    for req_state in view.waiting[view.scan_from :]:
        if may_start is not None and not may_start(req_state):
            continue
        if places is not None and not places.has_one(req_state):
            continue
        start = start_of(view, req_state)
        if start is None:
            continue
        if req_state.num_offered > len(start.cached) and not start.swap_in:
            fetch = _fetch(view, req_state, start)
            if fetch == PASSED:
                continue
            return fetch
        length = first_chunk(view, req_state, start)
        if not length:
            return None
        draft = EncoderDraft(view)
        length = draft.cut(req_state, view.free_rows[-1], start.num_computed, length)
        admission = _admission(view, req_state, start, length, draft) if length else None
        decision = admission or draft.left_behind(given_up=length > 0)
        if length or decision is not None:
            return decision
        if places is not None:
            places.pass_over(req_state)
    return None


def large_item_of_first(
    view: View, may_start: Callable[[RequestView], bool]
) -> tuple[RequestView, int] | None:
    """The request, and the item, that is encoded in pieces before it can start: of those that `may_start` the
    first that needs nothing else for it. Nobody is looked at behind one that is held back."""
    if not view.free_rows or view.tokens_left <= 0:
        return None
    places = AdapterPlaces(view, may_start) if view.config.max_loras else None
    for req_state in view.waiting[view.scan_from :]:
        if not may_start(req_state) or (start := start_of(view, req_state)) is None:
            continue
        if places is not None and not places.has_one(req_state):
            continue
        length = first_chunk(view, req_state, start)
        draft = EncoderDraft(view)
        if not length or draft.cut(req_state, view.free_rows[-1], start.num_computed, length):
            return None
        if draft.large is not None:
            return draft.large
    return None


def asked_in_step(view: View) -> set[str]:
    """Ids of the waiting requests that the open step's admissions came upon, once all of it is decided."""
    asked = {req_state.request.request_id for req_state in view.waiting[: view.scan_from]}

    def ask(req_state: RequestView) -> bool:
        asked.add(req_state.request.request_id)
        return True

    if not view.preempted_in_step:
        admit_next(view, ask)
    return asked


def first_chunk(view: View, req_state: RequestView, start: Start) -> int:
    """Tokens of the request's first step as far as the token budget goes; 0: the step has no room for
    what must go in one piece, and nobody behind it is asked."""
    left = len(req_state.tokens) - start.num_computed
    if left == 1 and _is_padded(view, start.num_computed):
        left += view.config.num_draft_tokens
        if left > view.tokens_left:
            return 0
    return min(left, view.tokens_left, threshold_of(view.config, len(view.requests)) or left)


def _is_padded(view: View, num_computed: int) -> bool:
    """Whether a request with one token left is given placeholders for its drafts: vLLM wants equal
    lengths in a step of decodes, one in which no running row is in its prompt. A prompt of one token is no
    decode when it is alone."""
    config = view.config
    if config.compat != "vllm" or not config.num_draft_tokens:
        return False
    if num_computed + config.num_draft_tokens + 2 > config.max_model_len:
        return False
    ran = [view.requests_by_row[row] for row in view.step_rows.tolist()]
    ran = [req_state for req_state in ran if req_state.admitted_step < view.step]
    return bool(ran or num_computed) and all(
        len(req_state.tokens) < view.num_tokens[req_state.row] for req_state in ran
    )


def _admission(
    view: View, req_state: RequestView, start: Start, length: int, draft: EncoderDraft
) -> ev.Admitted | ev.LeaseTaken | None:
    """ADMITTED for a chunk of `length` tokens; None when the blocks are not free, and no lease gives them."""
    if lacking := _lacking(view, req_state, start, length):
        return _taken_back(view, start, lacking)
    cached = start.cached
    revived = _num_free_hits(view, cached)
    num_new = _blocks_for(view, start.num_computed + length) - len(cached)
    new = _next_free(view, cached, revived, num_new)
    admitted = ev.Admitted(
        request_id=req_state.request.request_id,
        row=view.free_rows[-1],
        num_tokens=length,
        cached_blocks=cached.tobytes(),
        new_blocks=new.tobytes(),
        encode=tuple(draft.encode),
        evict=tuple(draft.evict),
        num_computed=ev.AS_CACHED
        if start.num_computed == len(cached) * view.block_size
        else start.num_computed,
        copy=(start.copy_from, int(new[0])) if start.copy_from != NO_BLOCK else None,
        swap_in=start.swap_in,
    )
    if view.config.num_state_slots:
        admitted = _with_state(view, admitted, start)
    adapter = req_state.request.adapter
    if adapter is None:
        return admitted
    return ev.AdmittedWithAdapter(
        **asdict(admitted), adapters_out=tuple(view.adapters.room_for(adapter) or ())
    )


def _with_state(view: View, admitted: ev.Admitted, start: Start) -> ev.AdmittedWithState:
    """A slot beside the one that is copied from; that one itself where there is no other."""
    slots = view.states.peek(2)
    slot = next((slot for slot in slots.tolist() if slot != start.state_from), start.state_from)
    return ev.AdmittedWithState(
        **asdict(admitted), state_slot=slot, state_from=start.state_from, num_shared=start.num_shared
    )


def _fetch(view: View, req_state: RequestView, start: Start) -> ev.Fetched | ev.LeaseTaken | Passed | None:
    """What a store offers beyond the hits; None when the blocks of the prompt are not free."""
    count = req_state.num_offered - len(start.cached)
    if lacking := _lacking(view, req_state, start, count * view.block_size):
        return _taken_back(view, start, lacking)
    new = _next_free(view, start.cached, _num_free_hits(view, start.cached), count)
    return fetched(view, req_state, start.cached, new)


def blocks_wanted(view: View, req_state: RequestView, start: Start, length: int) -> int:
    """Blocks that must be free for the request to start with `length` tokens: those that it takes, what
    is held in reserve for it, and hits that nobody holds."""
    num_new = max(_blocks_for(view, start.num_computed + length), _reserved(view, req_state)) - len(
        start.cached
    )
    return num_new + _num_free_hits(view, start.cached)


def _lacking(view: View, req_state: RequestView, start: Start, length: int) -> int:
    return max(0, blocks_wanted(view, req_state, start, length) - view.blocks.num_free)


def _taken_back(view: View, start: Start, lacking: int) -> ev.LeaseTaken | None:
    return taken_back(view, lacking, start.cached) if len(view.sessions) else None


def _num_free_hits(view: View, cached: np.ndarray) -> int:
    return int((view.blocks.references[cached] == 0).sum())


def start_of(view: View, req_state: RequestView) -> Start | None:
    """Where the request can start; None while it waits for its grammar, a store, or its group's prefill."""
    if req_state.waits_for_grammar or req_state.store != SETTLED:
        return None
    shared = _shared_prompt(view, req_state)
    if shared is not _ALONE:
        return shared
    cached = _cached_prefix(view, req_state)
    start = Start(cached, len(cached) * view.block_size)
    if view.config.num_state_slots:
        start = _from_state(view, cached)
    if req_state.num_swapped > start.num_computed:
        return Start(cached[:0], req_state.num_swapped, swap_in=True)
    return start


def num_found(view: View, request: Request) -> int:
    """Tokens of a request that is not here yet whose KV would be found, if it started now."""
    start = start_of(view, RequestState(request, 0, request.prompt_token_ids, ()))
    return 0 if start is None else start.num_computed


def _from_state(view: View, cached: np.ndarray) -> Start:
    """As much of the blocks as ends where a state is kept: what stands behind is computed again."""
    shared = len(cached) * view.block_size
    for count in range(len(cached), 0, -1):
        slot = view.states.find(int(view.blocks.content[cached[count - 1]]))
        if slot != ev.NO_STATE:
            return Start(cached[:count], count * view.block_size, state_from=slot, num_shared=shared)
    return Start(cached[:0], 0, num_shared=shared)


_ALONE = Start(np.zeros(0, np.int32), 0)


def _shared_prompt(view: View, req_state: RequestView) -> Start | None:
    """The blocks of the request's group, once its prompt is computed: all but the one that holds the
    last prompt token are shared, that one is copied. `_ALONE` when there is nothing to share."""
    leader = view.requests.get(req_state.request.group)
    if leader is None or leader is req_state or len(req_state.tokens) > req_state.num_prompt:
        return _ALONE
    if not _same_prompt(leader, req_state):
        return _ALONE
    if leader.row == NO_ROW:
        comes_first = leader.arrival < req_state.arrival and not leader.waits_for_grammar
        return None if comes_first and not leader.cancelled else _ALONE
    before = view.num_computed[leader.row] - view.scheduled[leader.row]
    if before < req_state.num_prompt or leader.admitted_step == view.step:
        return None  # copies run before this step's own KV, and its swaps in, are there
    if view.config.num_state_slots:
        return _ALONE  # from the state that was kept before the prompt's last token
    last = req_state.num_prompt - 1
    table, number = view.block_table[leader.row], last // view.block_size
    copied = last % view.block_size > 0
    return Start(table[:number].copy(), last, int(table[number]) if copied else NO_BLOCK)


def _same_prompt(one: RequestView, other: RequestView) -> bool:
    """Whether the two would fill their prompts' blocks with the same KV, for the same tenant."""
    return (
        one.media_keys == other.media_keys
        and one.request.media == other.request.media
        and one.request.cache_salt == other.request.cache_salt
        and digest_of(one.request.adapter) == digest_of(other.request.adapter)
        and np.array_equal(one.request.prompt_token_ids, other.request.prompt_token_ids)
    )


def _blocks_for(view: View, num_tokens: int) -> int:
    """Blocks that hold so many tokens and the drafter's lookahead."""
    return -(-min(num_tokens + view.config.lookahead_tokens, view.config.max_model_len) // view.block_size)


def _reserved(view: View, req_state: RequestView) -> int:
    """Blocks that must be free, hits included, before a request starts."""
    match view.config.admission_reserve:
        case "none":
            return 0
        case "prompt":
            if view.config.compat == "vllm":  # without the drafter's slots
                return -(-len(req_state.tokens) // view.block_size)
            return _blocks_for(view, len(req_state.tokens))
    return _blocks_for(
        view, min(req_state.num_prompt + req_state.request.sampling.max_tokens, view.config.max_model_len)
    )


def _next_free(view: View, cached: np.ndarray, revived: int, count: int) -> np.ndarray:
    """`count` free blocks that are not among the hits, which are about to be revived."""
    blocks = view.blocks.peek(count + revived) if revived else view.blocks.peek(count)
    return blocks[~np.isin(blocks, cached)][:count] if revived else blocks


def _scores_prompt(req_state: RequestView) -> bool:
    """Whether all of its prompt has to be computed: logits of each token are wanted, and not there yet."""
    asked = req_state.request.sampling.prompt_logprobs is not None
    return asked and len(req_state.tokens) == req_state.num_prompt


def _cached_prefix(view: View, req_state: RequestView) -> np.ndarray:
    """Blocks whose content is the request's own beginning, int32; at least one token is left to
    compute, for its logits."""
    size = view.block_size
    count = (len(req_state.tokens) - 1) // size
    if not view.config.enable_prefix_caching or not count or _scores_prompt(req_state):
        return np.zeros(0, np.int32)
    tokens = content_windows(req_state.tokens, 0, count, size, view.content_width)
    ahead = media_ahead(view.config, view.decision_version)
    return view.blocks.find_first(tokens, block_extras(req_state.request, 0, count, size, ahead))
