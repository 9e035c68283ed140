"""Applies events about fetching KV blocks from a block store.

While a waiting request fetches, it holds its prefix-hit blocks and the blocks that the fetch fills. After the
fetch the request releases all these blocks. The blocks stay in the prefix cache, where the request finds them
when it is scheduled.
"""

import numpy as np

from mmengine.core.state.blocks import block_extras, content_windows
from mmengine.core.state.prefix_index import ROOT
from mmengine.core.state.request_state import ASKED, DEADLINE, FETCHING, NO_BLOCKS, SETTLED, RequestState
from mmengine.core.state.state import State
from mmengine.events import vocabulary as ev


def ask(state: State, req_state: RequestState) -> None:
    """Make the request wait for an OFFERED event if a block store may have blocks for its prompt. The event
    reports the number of blocks.
    """
    asked = state.config.block_store and req_state.may_fetch(state.block_size)
    req_state.store = ASKED if asked else SETTLED


def apply_offered(state: State, event: ev.Offered) -> None:
    req_state = state.requests[event.request_id]
    # The last token is always computed, to get its logits, so no offer includes this token's block.
    most = (len(req_state.tokens) - 1) // state.block_size
    req_state.store, req_state.num_offered = SETTLED, max(0, min(event.num_blocks, most))


def apply_fetched(state: State, event: ev.Fetched) -> None:
    req_state = state.requests[event.request_id]
    cached, new = (np.frombuffer(blocks, np.int32) for blocks in (event.cached, event.blocks))
    if len(cached):
        state.blocks.share(cached)
    state.blocks.take_new(new)
    req_state.store, req_state.num_offered = FETCHING, 0
    req_state.fetch_blocks, req_state.num_fetching = np.concatenate((cached, new)), len(new)
    state.fetching[event.request_id] = None


def apply_arrived(state: State, event: ev.Arrived) -> None:
    """Add arrived blocks to the prefix index. Their KV is complete when the step that copies the blocks has
    returned.
    """
    req_state = state.requests[event.request_id]
    count = len(event.digests) // 8
    first = len(req_state.fetch_blocks) - req_state.num_fetching
    blocks = req_state.fetch_blocks[first : first + count]
    index, size = state.blocks.index, state.block_size
    content = int(index.content[req_state.fetch_blocks[first - 1]]) if first else ROOT
    extras = block_extras(req_state.request, first, first + count, size)
    tokens = content_windows(req_state.tokens, first, first + count, size, state.content_width)
    index.insert_chain(blocks, content, tokens, {number - first: own for number, own in extras.items()})
    state.step_filled.append(blocks)
    state.step_fetched.append((event.request_id, blocks))
    req_state.num_fetching -= count
    if not req_state.num_fetching:
        leave_fetch(state, req_state)


def apply_lost(state: State, event: ev.Lost) -> None:
    """End the request's fetch. After a missed deadline all offers are dropped, because other requests would
    also wait for the slow store.
    """
    leave_fetch(state, state.requests[event.request_id])
    if event.reason == DEADLINE:
        for req_state in state.requests.values():
            req_state.num_offered = 0


def leave_fetch(state: State, req_state: RequestState) -> None:
    """Release all blocks that the request holds for its fetch. The request no longer waits for the store."""
    req_state.store, req_state.num_offered, req_state.num_fetching = SETTLED, 0, 0
    if len(req_state.fetch_blocks):
        state.blocks.release(req_state.fetch_blocks)
        req_state.fetch_blocks = NO_BLOCKS
    state.fetching.pop(req_state.request.request_id, None)
