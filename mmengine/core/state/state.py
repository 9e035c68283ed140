"""The engine's state, which is the result of applying all events so far. Most values are arrays with an
element per row.

Only `evolve` writes to a state. Decisions read the state through a `View`, which has no methods that write. A
row is a slot in the running batch. A waiting request has no row, and its tokens are in its RequestState. The
open step is the step to which decisions are being added.
"""

import hashlib
from bisect import insort
from collections import deque

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from mmengine.config import EngineConfig
from mmengine.core.state.adapters import AdapterPool
from mmengine.core.state.blocks import BlockPool
from mmengine.core.state.columns import LEFT, NEVER, Columns, frozen, make_columns
from mmengine.core.state.flight import Flight, Part
from mmengine.core.state.goodput import Goodput
from mmengine.core.state.grammar_slots import GrammarSlots
from mmengine.core.state.policy import Policy, policy_of
from mmengine.core.state.request_state import NO_ROW, RequestState, media_keys_of
from mmengine.core.state.sessions import Sessions
from mmengine.core.state.state_slots import StateSlots
from mmengine.core.state.tenants import Tenants
from mmengine.core.state.window_blocks import WindowTables
from mmengine.encoder_cache.cache import EncoderCache
from mmengine.encoder_cache.work import work_of
from mmengine.events import vocabulary as ev
from mmengine.request import Request

_NO_ROWS = frozen(np.zeros(0, np.intp))


class History:
    """A 16-byte BLAKE2b digest of a sequence of byte strings. Each string is hashed together with the
    previous digest, so a snapshot needs only the last digest to continue."""

    def __init__(self) -> None:
        self._digest = bytes(16)

    def update(self, piece: bytes) -> None:
        """Add a byte string, such as token ids."""
        self._digest = hashlib.blake2b(self._digest + piece, digest_size=16).digest()

    def digest(self) -> bytes:
        """Return the digest of all byte strings so far."""
        return self._digest

    def restore(self, digest: bytes) -> None:
        """Continue from the digest in a snapshot."""
        self._digest = digest


class State(Columns[np.ndarray]):
    """One engine's state: the rows' columns, the requests, the pools and the open step."""

    def __init__(self, config: EngineConfig):
        self.config = config
        self.constants = ev.FoldConstants()  # STARTED sets the log's constants
        self.policy: Policy = policy_of(config)
        rows, self.block_size = config.num_rows, config.block_size
        longest = config.max_model_len + config.num_draft_tokens
        # A drafter's KV at a position also depends on the next token. Therefore a block's content includes
        # the token after the block. vLLM 0.32 leaves out this token, and computes the last cached block again
        # (core/decide/start.py).
        reads_ahead = bool(config.lookahead_tokens) and config.compat != "vllm-0.32"
        self.content_width = config.block_size + reads_ahead
        num_blocks = -(-config.max_model_len // config.block_size)
        self.__dict__.update(make_columns(rows, max(longest, self.content_width), num_blocks))
        self.max_total[:] = NEVER
        if config.num_state_slots:
            self.keep_at[:] = NEVER
        # [row, block number]: the tokens that determine the content of the block; a view of `token_ids`.
        windows = sliding_window_view(self.token_ids, self.content_width, axis=1)
        self.block_tokens = windows[:, :: config.block_size]
        self.requests_by_row = np.full(rows, None, object)  # RequestState or None
        self.num_with_media = 0  # number of rows whose request has media
        self.num_prefills = 0  # number of rows with prefill-only requests
        self.free_rows = list(range(rows - 1, -1, -1))
        # Row numbers are intp, the type to which numpy would convert other indices.
        self.running = _NO_ROWS  # in admission order
        self.requests: dict[str, RequestState] = {}
        self.waiting: list[RequestState] = []  # sorted by rank
        self.tenants = Tenants(rows, self.policy.num_ahead, is_fair=not config.compat)
        self.num_arrived = 0
        self.num_preempted = 0
        self.num_groups = config.num_groups
        # Whether vLLM's rules for block groups apply (lazy_windows.py).
        self.has_lazy_windows = self.num_groups > 1 and bool(config.compat)
        self.windows = WindowTables(config, num_blocks)
        num_windows, width, lazy = self.windows.num_groups, self.content_width, self.has_lazy_windows
        self.blocks = BlockPool(config.num_blocks, config.block_size, width, num_windows, is_lazy=lazy)
        self.encoder = EncoderCache(config.encoder_cache_size)
        self.part: Part | None = None  # last scheduled part of the media item that is being encoded
        self.num_large = 0  # number of requests with a media item above the limit on encoder work per step
        self.states = StateSlots(config.num_state_slots, self.blocks.content)
        self.adapters = AdapterPool(config.lora_bytes if config.max_loras else 0)
        # The last block of the array is used next.
        self.free_host_blocks = np.arange(config.swap_blocks, dtype=np.int32)[::-1]
        # `has_drafts`: whether any row has drafts after its known tokens. `verifies`: whether any step
        # verifies drafts. Both values may stay True for a few steps after the last draft.
        self.has_drafts = self.verifies = False
        self.goodput: Goodput | None = None  # chooses the drafters and the number of drafts
        if config.draft_policy == "goodput" and config.num_draft_tokens:
            self.goodput = Goodput(rows, config.num_draft_tokens, overlaps=config.max_in_flight > 1)
        self.cancelled: list[str] = []
        self.grammar_failed: list[str] = []
        self.grammar_slots = GrammarSlots()
        self.sessions = Sessions()
        self.fetching: dict[str, None] = {}  # requests with blocks that are being fetched from a block store
        self.suspects: dict[str, None] = {}  # requests that join only small steps after a failed step
        # Used only with vLLM's asynchronous rules. Maps the row of a preempted request with tokens in flight
        # to (request, whether these tokens are dropped).
        self.stale: dict[int, tuple[RequestState, bool]] = {}
        self.stopped: list[str] = []  # requests that were preempted, and then ended by a step in flight
        self.thrashing: list[str] = []  # requests that reached thrash_limit and were not reported yet
        self.resetting = False  # whether the running requests are about to be preempted for a cache reset
        self.step = 0  # number of the open step, or of the next step
        self.flights: deque[Flight] = deque()  # dispatched steps, oldest first
        # row -> encoder keys of its request, for requests that left while a step still computes the row
        self.leaving: dict[int, list[bytes]] = {}
        self.last_rows = _NO_ROWS  # rows of the previous step; SCHEDULED with `rows` None means these rows
        self.due_places: np.ndarray | None = None  # cached result of `due`; None after an event
        self.history = History()
        self.checkpointed_step = 0  # number of the step of the last CHECKPOINT
        self.reset_step()

    def reset_step(self) -> None:
        """Reset the open step's budgets and lists."""
        self.is_open = False
        self.preempted_in_step = False
        self.tokens_left = self.config.token_budget
        self.encoder_left = self.config.encoder_budget
        # Encoder work that is left for items that are not split into parts.
        self.work_left = self.config.encoder_piece
        self.step_part: Part | None = None
        self.tenants.num_passed.clear()
        self.step_rows = _NO_ROWS  # rows of the open step, in order
        self.step_filled: list[np.ndarray] = []  # blocks whose content the open step completes
        self.num_decided = 0  # number of rows at the front of `running` whose work is decided
        # (row for which the last preemption freed blocks, number of tokens in the row's chunk)
        self.made_room_for = (NO_ROW, 0)
        self.step_encoded: list[tuple[bytes, Request, int]] = []  # (key, request, index in its media)
        self.step_evicted: list[bytes] = []
        self.step_swapped: list[RequestState] = []  # requests whose KV the open step copies to the host
        self.step_kept: list[np.ndarray] = []  # int32 [n, 3]: (row, number of tokens in its state, slot)
        # (request id, blocks) for blocks that arrived from a block store
        self.step_fetched: list[tuple[str, np.ndarray]] = []
        self.step_copies: dict[str, list[np.ndarray]] = {"swap_out": [], "copy": [], "swap_in": []}

    def enqueue(self, request: RequestState) -> None:
        """Insert a request without a row into the waiting queue, ordered by rank."""
        request.rank = self.policy.rank(request)
        insort(self.waiting, request, key=lambda waiting: waiting.rank)
        self.tenants.enqueue(request)

    def clear_suspicion(self, req_state: RequestState) -> None:
        req_state.isolation_rows = 0
        self.suspects.pop(req_state.request.request_id, None)

    def new_request(self, request: Request) -> RequestState:
        tokens = request.prompt_token_ids
        if len(request.outputs):
            tokens = np.concatenate((tokens, request.outputs))
        state = RequestState(request, self.num_arrived, tokens, self.media_keys_of(request))
        self.weigh_media(state)
        self.num_arrived += 1
        return state

    def media_keys_of(self, request: Request) -> tuple[bytes, ...]:
        """Return the key in the encoder cache for each media item of the request."""
        if self.constants.salts_media:
            return media_keys_of(request)
        return tuple(item.mm_hash for item in request.media)

    def weigh_media(self, req_state: RequestState) -> None:
        """Compute the encoder work of each of the request's media items, if steps limit this work."""
        piece, even = self.config.encoder_piece, self.config.encoder_even_patches
        media = req_state.request.media
        if piece and media:
            req_state.media_work = tuple(work_of(item.grid, even) for item in media)
            req_state.has_large = max(req_state.media_work) > piece

    def known_tokens(self, req_state: RequestState) -> np.ndarray:
        """Return a live request's prompt and its answer so far, int32. For a request with a row, the result
        is a view that later events change.
        """
        row = req_state.row
        return req_state.tokens if row == NO_ROW else self.token_ids[row, : self.num_tokens[row]]

    def sampled_drafts(self) -> np.ndarray:
        """Return how many drafts each row in `sampled_rows` verifies, int32."""
        if self.flights and self.flights[0].num_drafts is not None:
            return self.flights[0].num_drafts
        return self.scheduled_drafts[self.sampled_rows()]

    def sampled_rows(self) -> np.ndarray:
        """Return the rows, intp, that sample tokens in the oldest step without a result."""
        return self.flights[0].sampled if self.flights else self._due_rows()

    def pooled_rows(self) -> list[int]:
        """Return the rows of pooled requests whose prompts end in the oldest step without a result."""
        if not self.num_prefills:
            return []
        flight = self.flights[0] if self.flights else None
        rows = self.step_rows if flight is None else flight.rows
        known = None if flight is None else flight.num_computed
        computed = self.num_computed[rows] if known is None else known
        whole = rows[computed >= self.num_tokens[rows]].tolist()
        live = ((row, self.requests_by_row[row]) for row in whole if self.ended[row] != LEFT)
        return [row for row, one in live if one is not None and one.request.pooling is not None]

    def filled_blocks(self) -> list[np.ndarray]:
        """Return the blocks whose content is completed by the oldest step without a result."""
        return self.flights[0].filled if self.flights else self.step_filled

    def due(self) -> np.ndarray:
        """Return the indices into `step_rows`, intp, of the rows that sample. These are the rows whose known
        and pending tokens are all computed after the step.
        """
        if self.due_places is None:
            ends = self.num_tokens[self.step_rows]
            if self.flights:
                ends = ends + self.num_pending[self.step_rows]
            due = self.num_computed[self.step_rows] >= ends
            if self.num_prefills:
                due &= self.num_tokens[self.step_rows] < self.max_total[self.step_rows]
            self.due_places = due.nonzero()[0]
        return self.due_places

    def _due_rows(self) -> np.ndarray:
        rows, due = self.step_rows, self.due()
        return rows if len(due) == len(rows) else rows[due]

    def step_of(self, event: ev.Event) -> int:
        """Return the number of the step to which the next event, `event`, belongs. EXECUTED and FAILED belong
        to the oldest step in flight, and other events to the open or next step.
        """
        returns = isinstance(event, (ev.Executed, ev.Failed))
        return self.flights[0].step if returns and self.flights else self.step

    def open_step(self) -> Flight:
        """Return the open step as a Flight."""
        overlaps = self.config.max_in_flight > 1
        return Flight(
            self.step,
            self.step_rows,
            self._due_rows(),
            self.num_computed[self.step_rows] if overlaps else None,
            self.config.token_budget - self.tokens_left,
            self.step_filled,
            self.step_encoded,
            [*self.encoder.dropped, *self.step_evicted],
            self.step_swapped,
            part_of=self.step_part.request_id if self.step_part is not None else "",
            kept=self.step_kept,
            num_scheduled=self.scheduled[self.step_rows] if overlaps and self.has_lazy_windows else None,
        )
