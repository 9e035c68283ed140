"""Simulates steps without a model. A sampled token depends on each KV slot that the request reads.

A KV slot contains a number, computed from the token, its position and its media feature. The sum over a
sequence's slots determines the next token. So errors such as a wrong block table, a block freed too early or
a missing feature change the output. `reference_tokens` computes the correct tokens.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from msgspec.structs import replace

from mmengine.config import EngineConfig
from mmengine.core.executor import PENDING, EncodePart, StepPlan, StepResult, room_of
from mmengine.core.state.adapters import digest_of
from mmengine.encoder_cache.cache import encoder_key
from mmengine.errors import ExecutorFailed
from mmengine.request import Request
from mmengine.simulation.device import embeds_of
from mmengine.simulation.sampled_rows import pooled_vectors
from mmengine.simulation.simulated_rules import add_prompts, prompt_value, run_value
from mmengine.simulation.simulated_states import SimulatedStates
from mmengine.simulation.simulated_windows import SimulatedWindows, UniformWindow

_ODD = np.uint64(0x9E3779B97F4A7C15)
_MIX = np.uint64(0xBF58476D1CE4E5B9)


@dataclass(frozen=True, slots=True)
class CostModel:
    """The simulated time of a step in ns.

    A step costs `step_ns`, plus `token_ns` per query token, `context_ns` per token in the rows' contexts, and
    `embed_ns` per computed embedding.
    """

    step_ns: int = 200_000
    token_ns: int = 5_000
    context_ns: int = 20
    embed_ns: int = 20_000

    def price(self, plan: StepPlan, num_embeds: int) -> int:
        num_tokens, context = len(plan.input_ids), int((plan.num_computed + plan.num_scheduled).sum())
        return (
            self.step_ns + self.token_ns * num_tokens + self.context_ns * context + self.embed_ns * num_embeds
        )


class SimulatedExecutor:
    """Executes steps with numbers instead of KV.

    `fault(step)`: returns an error text if the step must fail, else None. `eos_in`: on average, one in
    `eos_in` tokens ends the text; with 0, no token does. `check_kv`: in each step, add up all slots of a
    sequence again. Otherwise, stored sums are used. `arrived(request_id, n)`: returns the numbers in the next
    `n` blocks from the block store, uint64 [n, block_size].
    """

    needs_plan = True

    def __init__(
        self,
        config: EngineConfig,
        *,
        vocab_size: int = 1000,
        eos_in: int = 0,
        fault: Callable[[int], str | None] = lambda step: None,
        cost: CostModel = CostModel(),  # noqa: B008 - frozen
        check_kv: bool = False,
        arrived: Callable[[str, int], np.ndarray] | None = None,
    ):
        self._block_size = config.block_size
        self._num_draft_tokens = config.num_draft_tokens
        self._atomic_runs, self._whole_prompt = config.atomic_runs, config.whole_prompt
        self._vocab_size, self._eos_in = vocab_size, eos_in
        self._fault, self._cost, self._check_kv = fault, cost, check_kv
        self._arrived = arrived
        slots = config.num_blocks * config.block_size
        self._values = np.zeros(slots, np.uint64)
        self._sums = np.zeros(slots, np.uint64)  # the sum over the sequence up to this slot, inclusive
        self._host_values = np.zeros((config.swap_blocks, config.block_size), np.uint64)
        self._states = SimulatedStates(config) if config.num_state_slots else None
        self._windows = SimulatedWindows(config, self._values)
        self._uniform_window: UniformWindow | None = None
        if config.uniform_window:
            self._uniform_window = UniformWindow(config, self._values, self._sums)
        self._features: dict[bytes, int] = {}
        self._part: EncodePart | None = None  # the last encoder part, if its media item is incomplete
        self._requests: list[Request | None] = [None] * config.max_num_seqs
        self._last_tokens = np.zeros(config.max_num_seqs, np.int32)  # each row's last sampled token
        self._plans: deque[StepPlan] = deque()
        self._came: deque[list[tuple[np.ndarray, np.ndarray]]] = deque()  # each plan's fetched blocks
        self.clock_ns = 0

    def dispatch(self, plan: StepPlan) -> None:
        self._plans.append(plan)
        self._came.append([(blocks, self._take(name, len(blocks))) for name, blocks in plan.fetched])

    def _take(self, request_id: str, count: int) -> np.ndarray:
        if self._arrived is None:
            raise ExecutorFailed("the plan needs blocks of a store, but there is no store")
        return self._arrived(request_id, count)

    def kv(self, blocks: np.ndarray) -> np.ndarray:
        """Return the numbers in these blocks' slots, uint64 [n, block_size]."""
        return self._values.reshape(-1, self._block_size)[blocks].copy()

    def discard(self) -> None:
        self._plans.clear()
        self._came.clear()

    def collect(self) -> StepResult:
        plan, came = self._with_pending(self._plans.popleft()), self._came.popleft()
        for admission in plan.admitted:
            self._requests[admission.row] = admission.request
        for key in plan.evict:
            self._features.pop(key, None)
            if self._part is not None and self._part.item.key == key:
                self._part = None
        error = self._fault(plan.step)
        if error is not None:
            raise ExecutorFailed(error)
        if plan.part is not None:
            self._go_on(plan.part)
        for item in plan.encode:
            self._features[item.key] = item.request.media[item.index].num_embeds
        device_ns = self._cost.price(plan, embeds_of(plan))
        self.clock_ns += device_ns
        for blocks, values in came:
            self._values.reshape(-1, self._block_size)[blocks] = values
        self._copy(plan)
        self._write(plan)
        result = self._sample(plan, device_ns)
        if plan.pool:
            result.pooled = pooled_vectors(plan, self._sums[plan.slot_mapping])
        last = np.cumsum(result.counts) - 1 if result.counts is not None else slice(None)
        self._last_tokens[plan.rows[plan.sample]] = result.token_ids[last]
        return result

    def _go_on(self, part: EncodePart) -> None:
        before = self._part
        if part.start and (before is None or (before.item.key, before.until) != (part.item.key, part.start)):
            raise ExecutorFailed(f"an item continues at {part.start}, where its last part did not end")
        self._part = None if part.is_last else part

    def _with_pending(self, plan: StepPlan) -> StepPlan:
        """Return the plan with each PENDING token replaced by the row's last sampled token."""
        pending = plan.input_ids == PENDING
        if not pending.any() or plan.num_drafts is not None and plan.num_drafts.any():
            return plan  # in a step with drafts, -1 marks a draft's position instead of a PENDING token
        tokens = self._last_tokens[np.repeat(plan.rows, plan.num_scheduled)]
        return replace(plan, input_ids=np.where(pending, tokens, plan.input_ids))

    def close(self) -> None:
        self._features.clear()

    def _copy(self, plan: StepPlan) -> None:
        values = self._values.reshape(-1, self._block_size)
        if plan.swap_out is not None:
            self._host_values[plan.swap_out[:, 1]] = values[plan.swap_out[:, 0]]
        if plan.copy is not None:
            values[plan.copy[:, 1]] = values[plan.copy[:, 0]]
        if plan.swap_in is not None:
            values[plan.swap_in[:, 1]] = self._host_values[plan.swap_in[:, 0]]

    def _write(self, plan: StepPlan) -> None:
        values = token_values(plan.input_ids, plan.token_index)
        if plan.adapters:
            self._adapt(plan, values)
        for span in plan.media:
            if span.item_start + span.length > self._features[span.key]:
                raise ExecutorFailed("a span is longer than its item")
            places = np.arange(span.item_start, span.item_start + span.length)
            values[span.start : span.start + span.length] += feature_values(span.key, places)
            if self._atomic_runs:
                values[span.start : span.start + span.length] += run_value(span.length)
        if self._whole_prompt:
            add_prompts(plan, self._requests, values)
        self._values[plan.slot_mapping] = values
        if self._uniform_window is not None:
            self._uniform_window.run(plan)
            return
        starts = np.cumsum(plan.num_scheduled) - plan.num_scheduled
        sums = np.cumsum(values, dtype=np.uint64)
        before = self._sums_before(plan)
        if self._states is not None and plan.states is not None:
            self._states.run(plan, plan.states, values, before)
        base = before - (sums[starts] - values[starts])
        if plan.windows:
            base += self._windows.run(plan)
        self._sums[plan.slot_mapping] = sums + np.repeat(base, plan.num_scheduled)

    def _adapt(self, plan: StepPlan, values: np.ndarray) -> None:
        """Add the adapter's number to the values of rows with an adapter. Raises ExecutorFailed if the
        adapter is not loaded.
        """
        digests = [digest_of(self._request(row).adapter) for row in plan.rows.tolist()]
        if missing := {*digests, b""} - {*plan.adapters, b""}:
            raise ExecutorFailed(f"a row computes with the adapter {min(missing).hex()}, which is not loaded")
        own = np.array([adapter_value(digest) for digest in digests], np.uint64)
        values += np.repeat(own, plan.num_scheduled)

    def _request(self, row: int) -> Request:
        request = self._requests[row]
        assert request is not None
        return request

    def _sums_before(self, plan: StepPlan) -> np.ndarray:
        """Return the sum of the numbers in each row's computed slots, uint64 [n].

        If the plan admits a request, all slots are added up again. The request's prefix hits may contain
        blocks that another row fills in the same step, and sums for these blocks are not stored yet.
        """
        if not self._check_kv and not plan.admitted:
            index = np.maximum(plan.num_computed - 1, 0)
            blocks = plan.block_table[np.arange(len(index)), index // self._block_size].astype(np.int64)
            sums = self._sums[blocks * self._block_size + index % self._block_size]
            return np.where(plan.num_computed > 0, sums, np.uint64(0))
        before = np.zeros(len(plan.rows), np.uint64)
        for place in np.flatnonzero(plan.num_computed).tolist():
            index = np.arange(plan.num_computed[place])
            blocks = plan.block_table[place, index // self._block_size].astype(np.int64)
            slots = blocks * self._block_size + index % self._block_size
            before[place] = self._values[slots].sum(dtype=np.uint64)
        return before

    def _sample(self, plan: StepPlan, device_ns: int) -> StepResult:
        """Return the step's result.

        Arrays [s, width] have a column for the token after the last known token, and a column for the token
        after each draft.
        """
        ends = np.cumsum(plan.num_scheduled)[plan.sample]
        num_drafts = (
            np.zeros(len(ends), np.int64) if plan.num_drafts is None else plan.num_drafts[plan.sample]
        )
        width = 1 + int(num_drafts.max(initial=0))
        places = np.minimum((ends - num_drafts - 1)[:, None] + np.arange(width), ends[:, None] - 1)
        sums = self._sums[plan.slot_mapping[places]]
        requests = [self._requests[row] for row in plan.rows[plan.sample].tolist()]
        salts = np.array([request.sample_index for request in requests], np.uint64)[:, None]
        tokens = next_tokens(sums, salts, self._vocab_size)
        drafts = plan.input_ids[np.minimum(places + 1, len(plan.input_ids) - 1)]
        agrees = (tokens == drafts) & (np.arange(width) < num_drafts[:, None])
        counts = 1 + np.cumprod(agrees, axis=1)[:, : width - 1].sum(axis=1, dtype=np.int32)
        first_output = plan.token_index[places[:, 0]] + 2 - self._num_prompt(requests)
        stops = self._stops(sums, counts, requests, first_output)
        kept = np.arange(width) < counts[:, None]
        if plan.num_drafts is None:
            return StepResult(tokens[kept], stops=stops, device_ns=device_ns)
        last = np.arange(len(counts)), counts - 1
        index = plan.token_index[places[last]] + 1
        drafts, num_proposed = self._propose(sums[last], tokens[last], index, salts[:, 0])
        drafters = num_proposed % 2
        room = room_of(plan, drafters)
        if room is not None:
            num_proposed = np.minimum(num_proposed, room)
        proposed = drafts[np.arange(drafts.shape[1]) < num_proposed[:, None]]
        return StepResult(tokens[kept], stops, (), (), device_ns, counts, proposed, num_proposed, drafters)

    @staticmethod
    def _num_prompt(requests: list[Request]) -> np.ndarray:
        return np.array([len(request.prompt_token_ids) for request in requests], np.int64)

    def _stops(
        self, sums: np.ndarray, counts: np.ndarray, requests: list[Request], first_output: np.ndarray
    ) -> tuple[tuple[int, str], ...]:
        """Return (index, "eos") for each row whose new tokens end the text. Reduces `counts` to the tokens up
        to the end.
        """
        if not self._eos_in:
            return ()
        stops: list[tuple[int, str]] = []
        for index, place in np.argwhere(ends_text(sums, self._eos_in)).tolist():
            sampling = requests[index].sampling
            cut = stops and stops[-1][0] == index
            if cut or place >= counts[index] or sampling.ignore_eos:
                continue
            if first_output[index] + place >= sampling.min_tokens:
                counts[index] = place + 1
                stops.append((index, "eos"))
        return tuple(stops)

    def _propose(
        self, sums: np.ndarray, tokens: np.ndarray, index: np.ndarray, salts: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return the drafts, int32 [s, num_draft_tokens], and each row's number of drafts, int32 [s].

        The drafts are right up to a position that varies from row to row.
        """
        most = self._num_draft_tokens
        drafts = np.zeros((len(sums), most), np.int32)
        total, token = sums, tokens
        for place in range(most):
            total = total + token_values(token, index + place)
            token = next_tokens(total, salts, self._vocab_size)
            drafts[:, place] = token
        luck = (sums * _MIX) >> np.uint64(41)
        right = (luck % np.uint64(most + 1)).astype(np.int64)[:, None]
        drafts += (np.arange(most) >= right).astype(np.int32)
        num_drafts = ((luck >> np.uint64(8)) % np.uint64(most + 1)).astype(np.int32)
        return drafts, num_drafts


def token_values(token_ids: np.ndarray, index: np.ndarray) -> np.ndarray:
    """Return the numbers for tokens at the positions `index`, uint64."""
    mixed = (token_ids.astype(np.uint64) + np.uint64(1)) * _ODD + index.astype(np.uint64) * _MIX
    return (mixed ^ (mixed >> np.uint64(31))) * _MIX


def feature_values(key: bytes, places: np.ndarray) -> np.ndarray:
    return (np.uint64(int.from_bytes(key[:8], "little")) + places.astype(np.uint64)) * _ODD


def adapter_value(digest: bytes) -> int:
    """Return the number that an adapter adds for each token; 0: no adapter."""
    return int.from_bytes(digest[:8], "little")


def next_tokens(sums: np.ndarray, sample_index: np.ndarray, vocab_size: int) -> np.ndarray:
    mixed = (sums + sample_index * _ODD) * _MIX
    return ((mixed ^ (mixed >> np.uint64(33))) % np.uint64(vocab_size)).astype(np.int32)


def ends_text(sums: np.ndarray, eos_in: int) -> np.ndarray:
    return (((sums * _ODD) >> np.uint64(40)) % np.uint64(eos_in)) == 0


def reference_tokens(
    request: Request, config: EngineConfig, *, vocab_size: int = 1000, eos_in: int = 0
) -> tuple[list[int], str]:
    """Return the correct tokens and finish reason for a request, computed without blocks and steps."""
    prompt = request.prompt_token_ids
    own = np.uint64(adapter_value(digest_of(request.adapter)))
    values = token_values(prompt, np.arange(len(prompt))) + own
    for item in request.media:
        key, offset = encoder_key(item.mm_hash, request.cache_salt, request.visual_adapter), 0
        for start, length in item.runs:
            values[start : start + length] += feature_values(key, np.arange(offset, offset + length))
            offset += length
            if config.atomic_runs:
                values[start : start + length] += run_value(length)
    if config.whole_prompt:
        values += prompt_value(request, len(prompt))
    total = values.sum(dtype=np.uint64, keepdims=True)
    sampling, salt = request.sampling, np.array([request.sample_index], np.uint64)
    tokens: list[int] = []
    limit = min(sampling.max_tokens, config.max_model_len - len(prompt))
    while True:
        token = next_tokens(total, salt, vocab_size)
        tokens.append(int(token[0]))
        stops = eos_in and not sampling.ignore_eos and len(tokens) >= sampling.min_tokens
        if stops and ends_text(total, eos_in)[0]:
            return tokens, "stop"
        if len(tokens) >= limit:
            return tokens, "length"
        total = total + own + token_values(token, np.array([len(prompt) + len(tokens) - 1]))
