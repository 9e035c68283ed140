"""A simulation's workload: requests with their arrival times, events at certain steps, and generated prompts
and images.
"""

import hashlib
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from mmengine.request import PREFILL, Adapter, GrammarRequest, MediaItem, Request, SamplingParams
from mmengine.simulation.hashing import crc_of_numbers, prefix_state

# generated prompts and the fake model use token ids from TOKEN_LOW to TOKEN_HIGH - 1
TOKEN_LOW, TOKEN_HIGH = 1000, 31000
IMAGE_TOKEN = 151655
NEVER = -1


@dataclass(frozen=True, slots=True)
class SimRequest:
    """A request that has not arrived yet.

    `prompt` generates the prompt's tokens (int32 [num_prompt]) only on arrival, to save memory. `arrival` is
    a step number in a scenario, and nanoseconds in a trace. The model emits `stop_token` at output index
    `stop_at` (or NEVER). `ranges` is the request's grammar: output token j must lie in
    [low, high) = ranges[j % len]. At output index `bad_at` (or NEVER), the model emits a token that the
    grammar forbids.
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
    session: str = ""  # id of the session that the request continues, or ""

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
    """An event at a step. `op` is abort, grammar_ready, grammar_error, reset_prefix_cache or close_session.

    For close_session, `request_id` is the session's id. A `late` event occurs while the step runs. Other
    events occur before the step is decided.
    """

    step: int
    op: str
    request_id: str = ""
    late: bool = False
    reset_running: bool = False


@dataclass(slots=True)
class Workload:
    """The requests and events of a simulation.

    `timed`: whether arrivals are nanoseconds on the simulated clock instead of step numbers. `events`: with
    None, there are no events and each grammar is ready immediately. `expect`: the records (records.py) that a
    scenario expects.
    """

    name: str
    requests: list[SimRequest]
    timed: bool
    settings: dict = field(default_factory=dict)
    events: list[SimEvent] | None = None
    max_steps: int = 2**62
    expect: list[dict] | None = None
    media_names: dict[bytes, str] = field(default_factory=dict)  # names of images by mm_hash

    @property
    def without_grammar(self) -> set[str]:
        """The ids of requests with a failing grammar. Two runs may end these requests in different steps."""
        return {each.request_id for each in self.events or () if each.op == "grammar_error"}

    @property
    def longest(self) -> int:
        """The number of tokens in the longest request (prompt and output) or session (sum over its
        requests).
        """
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
        """The names of all adapters in the workload."""
        return {each.adapter.name for each in self.requests if each.adapter is not None}

    @property
    def largest_item(self) -> int:
        """The number of embeddings in the largest image or video; 1 if the workload has no media."""
        return max((item.num_embeds for each in self.requests for item in each.media), default=1)


def generated_tokens(key: str, start: int, count: int) -> np.ndarray:
    """Return, as int32, `count` tokens of the pseudo-random text `key`, from position `start`.

    A token depends only on the key and the position.
    """
    numbers = np.arange(start, start + count, dtype=np.int64)
    crc = crc_of_numbers(np.array([prefix_state(f"{key}:")], np.uint32), numbers)
    return (TOKEN_LOW + crc % (TOKEN_HIGH - TOKEN_LOW)).astype(np.int32)


def image_item(offset: int, length: int, name: str) -> MediaItem:
    """Return an image whose `length` embeddings begin at prompt token `offset`. Images with equal names have
    equal contents.
    """
    return MediaItem(name_hash(name), "image", ((offset, length),), (1, 2, 2 * length))


def name_hash(name: str) -> bytes:
    return hashlib.sha256(name.encode()).digest()
