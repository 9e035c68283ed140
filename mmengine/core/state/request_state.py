"""One live request's state beside its row's columns."""

from dataclasses import dataclass, field

import numpy as np

from mmengine.encoder_cache.cache import encoder_key
from mmengine.events.vocabulary import Queued
from mmengine.request import Request

NO_ROW = -1  # in place of a row: the request waits
NEVER_RAN = -1  # in place of a number: the request had no row yet
# The state of a waiting request with a block store: nothing to wait for, asked for its blocks, fetching
# blocks.
SETTLED, ASKED, FETCHING = 0, 1, 2
DEADLINE = "deadline"  # the reason of a lost fetch: the store did not answer in time
NO_BLOCKS = np.zeros(0, np.int32)


@dataclass(slots=True, eq=False, repr=False)
class RequestState:
    """One live request's state. `arrival` numbers requests from 0."""

    request: Request
    arrival: int
    tokens: np.ndarray  # int32, the known tokens when the request last lost its row, or at its arrival
    media_keys: tuple[bytes, ...]
    rank: tuple[int, ...] = ()
    row: int = NO_ROW
    preempted: int = 0  # the number of its last preemption, counted over all requests from 1
    num_cached: int = NEVER_RAN  # cached prompt tokens at its first admission
    waits_for_grammar: bool = False
    host_blocks: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int32))  # blocks of its swapped KV
    num_swapped: int = 0  # tokens of its swapped KV
    admitted_step: int = NEVER_RAN  # the step of its last admission
    idle_preemptions: int = 0  # consecutive preemptions without a token in between
    failures: int = 0  # failed steps in which it was alone, plus one if others failed with it
    isolation_rows: int = 0  # most rows of a step that it may join after a failed step; 0: no limit
    cancelled: str = ""
    detail: str = ""  # how the text ended, or what went wrong
    # indices of the items whose encoder outputs it references
    held_media: set[int] = field(default_factory=set)
    media_work: tuple[int, ...] = ()  # work to encode each item; () if this engine has no limit for it
    has_large: bool = False  # whether an item takes more work than a step may
    store: int = SETTLED
    num_offered: int = 0  # blocks of its prefix that a store offers
    # blocks that it holds while it fetches, in order
    fetch_blocks: np.ndarray = field(default_factory=lambda: NO_BLOCKS)
    num_fetching: int = 0  # how many of the last of them have not arrived

    @property
    def num_prompt(self) -> int:
        return len(self.request.prompt_token_ids)

    def may_fetch(self, block_size: int) -> bool:
        """Return whether a store can have useful blocks: at least one full block, of a request without prompt
        logprobs.
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
    )


def media_keys_of(request: Request) -> tuple[bytes, ...]:
    """Return the request's items' keys in the encoder cache."""
    return tuple(
        encoder_key(item.mm_hash, request.cache_salt, request.visual_adapter) for item in request.media
    )
