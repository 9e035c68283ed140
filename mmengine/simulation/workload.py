"""Workloads: requests, their arrivals, and events at certain steps."""

import hashlib
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from mmengine.request import PREFILL, Adapter, GrammarRequest, MediaItem, Request, SamplingParams
from mmengine.simulation.hashing import crc_of_numbers, prefix_state

TOKEN_LOW, TOKEN_HIGH = 1000, 31000  # the range for tokens from the fake model and in generated prompts
IMAGE_TOKEN = 151655
NEVER = -1


@dataclass(frozen=True, slots=True)
class SimRequest:
    """A request before it arrives. `prompt` makes its tokens (int32 [num_prompt]) at its arrival, so that a
    long trace holds only live requests' tokens.

    `arrival`: a step in a scenario, ns in a trace. `stop_at`: the output index at which the model emits
    `stop_token`; NEVER for neither. `ranges`: output token j must lie in [low, high) = ranges[j % len].
    `bad_at`: the output index at which the model breaks that rule, or NEVER.
    """

    request_id: str
    num_prompt: int
    prompt: Callable[[], np.ndarray]
    max_tokens: int
    arrival: int = 0
    media: tuple[MediaItem, ...] = ()
    priority: int = 0
    stop_token: int = NEVER
    stop_at: int = NEVER
    ranges: tuple[tuple[int, int], ...] = ()
    bad_at: int = NEVER
    adapter: Adapter | None = None
    session: str = ""  # the session that the request continues

    def request(self) -> Request:
        return Request(
            request_id=self.request_id,
            prompt_token_ids=self.prompt(),
            sampling=SamplingParams(max_tokens=self.max_tokens, seed=0) if self.max_tokens else PREFILL,
            media=self.media,
            priority=self.priority,
            grammar=GrammarRequest("ranges", repr(self.ranges)) if self.ranges else None,
            adapter=self.adapter,
        )


@dataclass(frozen=True, slots=True)
class SimEvent:
    """An event at a step. `op`: abort, grammar_ready, grammar_error, reset_prefix_cache, close_session
    (`request_id` names the session then). `late`: while the step runs instead of before it is decided.
    """

    step: int
    op: str
    request_id: str = ""
    late: bool = False
    reset_running: bool = False


@dataclass(slots=True)
class Workload:
    """A workload. `timed`: arrivals are ns on the simulated clock, not steps. `events` None: no event reports
    ready grammars, so each is ready at once. `expect`: a scenario's expected records.
    """

    name: str
    requests: list[SimRequest]
    timed: bool
    settings: dict = field(default_factory=dict)
    events: list[SimEvent] | None = None
    max_steps: int = 2**62
    expect: list[dict] | None = None
    media_names: dict[bytes, str] = field(default_factory=dict)  # by mm_hash

    @property
    def without_grammar(self) -> set[str]:
        """Ids of requests whose grammar fails. Recordings disagree on the place of their ends."""
        return {each.request_id for each in self.events or () if each.op == "grammar_error"}

    @property
    def longest(self) -> int:
        """Tokens in the longest request, prompt and output; in a session, all its requests' tokens."""
        of_sessions: Counter[str] = Counter()
        longest = 1
        for each in self.requests:
            length = each.num_prompt + max(each.max_tokens, 1)
            if each.session:
                of_sessions[each.session] += length
            longest = max(longest, of_sessions[each.session], length)
        return longest

    @property
    def adapters(self) -> set[str]:
        """Names of the requests' adapters."""
        return {each.adapter.name for each in self.requests if each.adapter is not None}

    @property
    def largest_item(self) -> int:
        """Embeddings in the largest image or video; 1 without any."""
        return max((item.num_embeds for each in self.requests for item in each.media), default=1)


def generated_tokens(key: str, start: int, count: int) -> np.ndarray:
    """Return tokens from the generated text `key`, int32: the same for the same key and place."""
    numbers = np.arange(start, start + count, dtype=np.int64)
    crc = crc_of_numbers(np.array([prefix_state(f"{key}:")], np.uint32), numbers)
    return (TOKEN_LOW + crc % (TOKEN_HIGH - TOKEN_LOW)).astype(np.int32)


def image_item(offset: int, length: int, name: str) -> MediaItem:
    """Return an image with `length` embeddings at prompt token `offset`; equal names mean equal contents."""
    return MediaItem(name_hash(name), "image", ((offset, length),), (1, 2, 2 * length))


def name_hash(name: str) -> bytes:
    return hashlib.sha256(name.encode()).digest()
