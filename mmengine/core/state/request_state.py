"""One live request's state, except for the values in its row's columns."""

from dataclasses import dataclass, field

import numpy as np

from mmengine.encoder_cache.cache import encoder_key
from mmengine.events.vocabulary import Queued
from mmengine.request import Request

NO_ROW = -1  # value of `row` while the request waits
NEVER_RAN = -1  # value of `num_cached` and `admitted_step` before the first admission
# Values of `store`. SETTLED: the request does not wait for a block store. ASKED: the request waits for the
# store's event OFFERED. FETCHING: the request waits for blocks.
SETTLED, ASKED, FETCHING = 0, 1, 2
DEADLINE = "deadline"  # reason in the event LOST if the block store did not reply in time
NO_BLOCKS = np.zeros(0, np.int32)


@dataclass(slots=True, eq=False, repr=False)
class RequestState:
    """One live request's state. `arrival`: the request's number in arrival order, from 0. `rank`:
    the request's sort key in the waiting queue.
    """

    request: Request
    arrival: int
    tokens: np.ndarray  # int32, all tokens at the request's arrival or last preemption
    media_keys: tuple[bytes, ...]
    rank: tuple[int, ...] = ()
    row: int = NO_ROW
    preempted: int = 0  # number of the request's last preemption; the engine numbers all preemptions from 1
    num_cached: int = NEVER_RAN  # number of prompt tokens that were cached at the first admission
    waits_for_grammar: bool = False
    host_blocks: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int32))  # blocks with swapped KV
    num_swapped: int = 0  # number of tokens whose KV is in `host_blocks`
    admitted_step: int = NEVER_RAN  # number of the step that last admitted the request
    idle_preemptions: int = 0  # number of preemptions since the request last got a token
    # Counts the request's failed steps. With `isolates_failures`, a failed step with several requests raises
    # the count only from 0 to 1.
    failures: int = 0
    # After a failed step, the request may only join steps with at most this many rows; 0: no limit.
    isolation_rows: int = 0
    cancelled: str = ""
    detail: str = ""  # what ended the text, or the error
    # Indices of the media items whose encoder outputs the request references.
    held_media: set[int] = field(default_factory=set)
    media_work: tuple[int, ...] = ()  # encoder work of each item; () without a limit on a step's encoder work
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
        """Return whether blocks from a store could help. A request without a full block before its last token
        cannot use fetched blocks. A request with prompt logprobs must compute its whole prompt.
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
