"""Finds the first token that a waiting request must compute. Earlier tokens come from prefix hits, from the
group leader's prompt, or from KV in host memory. The group leader is the earlier request with the same prompt
that `Request.group` names.
"""

from typing import NamedTuple

import numpy as np

from mmengine.core.decide.whole_runs import whole_hits
from mmengine.core.decide.window_hits import window_hits
from mmengine.core.state.adapters import digest_of
from mmengine.core.state.blocks import block_extras, content_windows
from mmengine.core.state.prefix_index import NO_BLOCK
from mmengine.core.state.read_only import RequestView
from mmengine.core.state.request_state import NO_ROW, SETTLED, RequestState
from mmengine.core.state.uniform_window import num_skipped
from mmengine.core.state.view import View
from mmengine.events import vocabulary as ev
from mmengine.request import Request, run_start


class Start(NamedTuple):
    """A position in the prompt at which a request can start to compute.

    `cached`: shared blocks, int32, in the order of the block groups. `num_computed`: number of tokens whose
    KV exists or is copied. `copy_from`: the block to copy, or NO_BLOCK. `swap_in`: whether the request's own
    KV is copied back from the host.

    With recurrent states: `state_from` is the slot that holds the state after the shared blocks. `num_shared`
    is how many tokens the request could share if each block had a kept state.
    """

    cached: np.ndarray
    num_computed: int
    copy_from: int = NO_BLOCK
    swap_in: bool = False
    state_from: int = ev.NO_STATE
    num_shared: int = 0


_NOTHING_SHARED = Start(np.zeros(0, np.int32), 0)


def start_of(view: View, req_state: RequestView) -> Start | None:
    """Return where the request can start. Returns None while the request waits for its grammar, a block
    store, or its group leader's prefill.
    """
    if req_state.waits_for_grammar or req_state.store != SETTLED:
        return None
    shared = _shared_prompt(view, req_state)
    if shared is not _NOTHING_SHARED:
        return shared
    cached = _cached_prefix(view, req_state)
    start = Start(cached, len(cached) * view.block_size)
    if view.config.num_state_slots:
        start = _from_state(view, cached)
    elif view.num_groups > 1:
        start = Start(*window_hits(view, req_state, cached))
    elif skipped := num_skipped(view.config, start.num_computed):
        start = Start(cached[skipped:], start.num_computed)
    if req_state.num_swapped > start.num_computed:
        return Start(cached[:0], req_state.num_swapped, swap_in=True)
    return start


def num_found(view: View, request: Request) -> int:
    """Return how many prompt tokens have KV in the prefix cache now. The engine need not have
    accepted `request` yet."""
    req_state = RequestState(request, 0, request.prompt_token_ids, ())
    start = start_of(view, RequestView.of(req_state))
    return 0 if start is None else start.num_computed


def _from_state(view: View, cached: np.ndarray) -> Start:
    """Return a start after the last prefix hit that has a kept state. Tokens after this state are computed
    again, even if they are prefix hits.
    """
    shared = len(cached) * view.block_size
    for count in range(len(cached), 0, -1):
        slot = view.states.find(int(view.blocks.content[cached[count - 1]]))
        if slot != ev.NO_STATE:
            return Start(cached[:count], count * view.block_size, state_from=slot, num_shared=shared)
    return Start(cached[:0], 0, num_shared=shared)


def _shared_prompt(view: View, req_state: RequestView) -> Start | None:
    """Return a start that shares the group leader's blocks.

    The request computes only the last prompt token, or with atomic runs the whole run that contains this
    token. Full blocks before the first computed token are shared; a partly shared block is copied. Returns
    None until the leader has computed the prompt, and `_NOTHING_SHARED` if nothing can be shared.
    """
    leader = view.requests.get(req_state.request.group)
    if leader is None or leader is req_state or len(req_state.tokens) > req_state.num_prompt:
        return _NOTHING_SHARED
    if not _same_prompt(leader, req_state):
        return _NOTHING_SHARED
    if leader.row == NO_ROW:
        comes_first = leader.arrival < req_state.arrival and not leader.waits_for_grammar
        return None if comes_first and not leader.cancelled else _NOTHING_SHARED
    before = view.num_computed[leader.row] - view.scheduled[leader.row]
    if before < req_state.num_prompt or leader.admitted_step == view.step:
        return None  # a step begins by copying blocks, so the leader's KV must already exist
    if view.config.num_state_slots or view.config.block_groups:
        return _NOTHING_SHARED  # models with recurrent states or windows share only by prefix hits
    last = req_state.num_prompt - 1
    if view.config.atomic_runs:
        last = run_start(req_state.request.media, last)
    table, number = view.block_table[leader.row], last // view.block_size
    copied = last % view.block_size > 0
    return Start(table[:number].copy(), last, int(table[number]) if copied else NO_BLOCK)


def _same_prompt(one: RequestView, other: RequestView) -> bool:
    """Return whether both requests have equal prompts, media, cache salts and adapters."""
    return (
        one.media_keys == other.media_keys
        and one.request.media == other.request.media
        and one.request.cache_salt == other.request.cache_salt
        and digest_of(one.request.adapter) == digest_of(other.request.adapter)
        and np.array_equal(one.request.prompt_token_ids, other.request.prompt_token_ids)
    )


def _scores_prompt(req_state: RequestView) -> bool:
    """Return whether the whole prompt must be computed for prompt logprobs."""
    is_wanted = req_state.request.sampling.prompt_logprobs is not None
    return is_wanted and len(req_state.tokens) == req_state.num_prompt


def _cached_prefix(view: View, req_state: RequestView) -> np.ndarray:
    """Return the cached blocks, int32, for the request's first tokens. The last token is always computed, for
    its logits.
    """
    size = view.block_size
    count = (len(req_state.tokens) - 1) // size
    if not view.config.enable_prefix_caching or not count or _scores_prompt(req_state):
        return np.zeros(0, np.int32)
    tokens = content_windows(req_state.tokens, 0, count, size, view.content_width)
    ahead, whole_prompt = view.constants.media_ahead, view.config.whole_prompt
    extras = block_extras(req_state.request, 0, count, size, ahead, whole_prompt)
    found = view.blocks.find_first(tokens, extras)
    if view.config.atomic_runs:
        found = found[: whole_hits(req_state.request.media, len(found), size)]
    recomputes = view.config.compat == "vllm-0.32" and view.config.lookahead_tokens
    return found[:-1] if recomputes else found
