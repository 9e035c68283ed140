"""One live request, as the engine knows it beside the columns of its row."""

from dataclasses import dataclass, field

import numpy as np

from mmengine.encoder_cache.cache import encoder_key
from mmengine.events.vocabulary import Queued
from mmengine.request import Request

NO_ROW = -1  # it waits
NEVER_RAN = -1  # it had no row yet
# What a waiting request hears of a store of blocks: nothing more, what it has, what is fetched.
SETTLED, ASKED, FETCHING = 0, 1, 2
DEADLINE = "deadline"  # why something is lost: the store did not say anything in time
NO_BLOCKS = np.zeros(0, np.int32)


@dataclass(slots=True, eq=False, repr=False)
class RequestState:
    """What is known of one live request. `arrival` numbers requests from 0."""

    request: Request
    arrival: int
    tokens: np.ndarray  # int32, all known tokens as of the last time without a row
    media_keys: tuple[bytes, ...]
    rank: tuple[int, ...] = ()
    row: int = NO_ROW
    preempted: int = 0  # the number of the last preemption that put it back, counted over all from 1
    num_cached: int = NEVER_RAN  # prompt tokens that were cached when it first ran
    waits_for_grammar: bool = False
    host_blocks: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int32))  # its swapped KV
    num_swapped: int = 0  # tokens whose KV is in them
    admitted_step: int = NEVER_RAN  # when it got its row
    idle_preemptions: int = 0  # in a row, without a token in between
    failures: int = 0  # steps that failed with it alone, and one more if others failed with it
    isolation_rows: int = 0  # most rows of a step that it may be in, after one that failed; 0: no limit
    cancelled: str = ""
    detail: str = ""  # how the text ended, or what went wrong
    held_media: set[int] = field(default_factory=set)  # indices of items it references
    media_work: tuple[int, ...] = ()  # to encode each item; (): it does not matter to this engine
    has_large: bool = False  # an item of it takes more than a step may
    store: int = SETTLED
    num_offered: int = 0  # blocks of its beginning that a store has
    fetch_blocks: np.ndarray = field(default_factory=lambda: NO_BLOCKS)  # held while it fetches, in order
    num_fetching: int = 0  # the last of them that have not arrived

    @property
    def num_prompt(self) -> int:
        return len(self.request.prompt_token_ids)

    def may_fetch(self, block_size: int) -> bool:
        """Whether a store can have anything of use for it: a block, and not one whose logits are wanted."""
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
    """By which the encoder cache knows its items."""
    return tuple(
        encoder_key(item.mm_hash, request.cache_salt, request.visual_adapter) for item in request.media
    )
