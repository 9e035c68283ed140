"""One live request's state, except for the values in its row's columns."""

from dataclasses import dataclass, field

import numpy as np

from mmengine.encoder_cache.cache import encoder_key
from mmengine.events.vocabulary import Queued
from mmengine.request import Request

NO_ROW = -1  # value of `row`: the request has no row, because it waits
NEVER_RAN = -1  # value of `num_cached` and `admitted_step`: the request never had a row
# Values of `store`. SETTLED: the request does not wait for a block store. ASKED: it waits for OFFERED.
# FETCHING: it waits for blocks that are being fetched.
SETTLED, ASKED, FETCHING = 0, 1, 2
DEADLINE = "deadline"  # the reason of LOST if the store did not reply in time
NO_BLOCKS = np.zeros(0, np.int32)


@dataclass(slots=True, eq=False, repr=False)
class RequestState:
    """One live request's state. `arrival`: the request's number in arrival order, from 0. `rank`:
    the request's sort key in the waiting queue.
    """

    request: Request
    arrival: int
    tokens: np.ndarray  # int32, the known tokens at arrival, or when the request last lost its row
    media_keys: tuple[bytes, ...]
    rank: tuple[int, ...] = ()
    row: int = NO_ROW
    preempted: int = 0  # number of its last preemption among the preemptions of all requests, from 1
    num_cached: int = NEVER_RAN  # number of prompt tokens that were cached at the first admission
    waits_for_grammar: bool = False
    host_blocks: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int32))  # blocks with swapped KV
    num_swapped: int = 0  # number of tokens whose KV is in `host_blocks`
    admitted_step: int = NEVER_RAN  # number of the step that admitted the request last
    idle_preemptions: int = 0  # number of consecutive preemptions without a token between them
    # Number of failed steps with only this request; 1 if it failed only together with other requests.
    failures: int = 0
    # After a failed step, the request may only join steps with at most this many rows; 0: no limit.
    isolation_rows: int = 0
    cancelled: str = ""
    detail: str = ""  # what ended the text, or the error
    # Indices of the media items whose encoder outputs the request references.
    held_media: set[int] = field(default_factory=set)
    media_work: tuple[int, ...] = ()  # encoder work of each item; () if a step has no limit for this work
    has_large: bool = False  # whether an item needs more work than one step may do
    store: int = SETTLED
    num_offered: int = 0  # number of blocks of the request's prefix that a block store offers
    # Blocks that the request holds during a fetch, in order.
    fetch_blocks: np.ndarray = field(default_factory=lambda: NO_BLOCKS)
    num_fetching: int = 0  # number of blocks at the end of `fetch_blocks` that have not arrived

    @property
    def num_prompt(self) -> int:
        return len(self.request.prompt_token_ids)

    def may_fetch(self, block_size: int) -> bool:
        """Return whether a block store could help the request. The request must have a full block before its
        last token. A request that still needs prompt logprobs computes its whole prompt.
        """
        scored = self.request.sampling.prompt_logprobs is not None and len(self.tokens) == self.num_prompt
        return len(self.tokens) > block_size and not scored


def request_of(event: Queued) -> Request:
    return Request(
        request_id=event.request_id,
        prompt_token_ids=np.frombuffer(event.prompt, np.int32),
        sampling=event.sampling,
        media=event.media,
        sample_index=event.sample_index,
        priority=event.priority,
        cache_salt=event.cache_salt,
        deadline_ns=event.deadline_ns,
        grammar=event.grammar,
        group=event.group,
        envelope=event.envelope,
        thinking=event.thinking,
        outputs=np.frombuffer(event.outputs, np.int32),
        adapter=event.adapter,
        tenant=event.tenant,
        pooling=event.pooling,
    )


def queued_of(request: Request) -> Queued:
    return Queued(
        request.request_id,
        request.prompt_token_ids.tobytes(),
        request.sampling,
        request.media,
        request.sample_index,
        request.priority,
        request.cache_salt,
        request.deadline_ns,
        request.grammar,
        request.group,
        envelope=request.envelope,
        thinking=request.thinking,
        outputs=request.outputs.tobytes(),
        adapter=request.adapter,
        tenant=request.tenant,
        pooling=request.pooling,
    )


def media_keys_of(request: Request) -> tuple[bytes, ...]:
    """Return the key in the encoder cache for each media item of the request."""
    return tuple(
        encoder_key(item.mm_hash, request.cache_salt, request.visual_adapter) for item in request.media
    )
