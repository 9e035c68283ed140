"""Measures a simulation: latencies on the simulated clock, and the use of resources over time."""

from array import array
from dataclasses import dataclass, field

import numpy as np

from mmengine.core.executor import StepPlan, StepResult
from mmengine.core.state.state import State
from mmengine.events.vocabulary import ANSWERED
from mmengine.simulation.workload import NEVER


@dataclass(frozen=True, slots=True)
class Spread:
    """Percentiles of times in ns, by the nearest-rank method."""

    p50: int = 0
    p90: int = 0
    p99: int = 0

    @classmethod
    def of(cls, values: np.ndarray) -> "Spread":
        if not len(values):
            return cls()
        ordered = np.sort(values)
        return cls(*(int(ordered[-(-len(ordered) * share // 100) - 1]) for share in (50, 90, 99)))


@dataclass(slots=True)
class Timeline:
    """The resources in use over time. Each array has one entry per dispatched step."""

    time_ns: array = field(default_factory=lambda: array("q"))
    running: array = field(default_factory=lambda: array("q"))
    waiting: array = field(default_factory=lambda: array("q"))
    kv_blocks: array = field(default_factory=lambda: array("q"))  # in use
    encoder: array = field(default_factory=lambda: array("q"))  # embeddings that requests hold
    tokens: array = field(default_factory=lambda: array("q"))  # scheduled


class Meter:
    """Measures requests. Arrays have one entry per request, in arrival order."""

    def __init__(self, num_requests: int, num_rows: int):
        self._numbers: dict[str, int] = {}
        self._by_row = np.zeros(num_rows, np.int64)
        self.arrived_ns = np.full(num_requests, NEVER, np.int64)
        self.first_ns = np.full(num_requests, NEVER, np.int64)
        self.admitted_ns = np.full(num_requests, NEVER, np.int64)
        self.end_ns = np.full(num_requests, NEVER, np.int64)
        self.num_cached = np.full(num_requests, NEVER, np.int64)
        self.num_prompt = np.zeros(num_requests, np.int64)
        self._over = np.zeros(num_requests, bool)
        self._last_ns = np.zeros(num_requests, np.int64)
        self._gaps: list[np.ndarray] = []
        self._gap_owners: list[np.ndarray] = []  # for each gap between tokens, the request's index
        self.ends: dict[str, int] = {}  # finish reason -> number of requests
        self.num_preemptions = 0
        self.num_output_tokens = 0
        self.num_scheduled_tokens = 0
        self.num_encoded = 0
        self.timeline = Timeline()

    def arrived(self, request_id: str, num_prompt: int, arrival_ns: int) -> None:
        number = self._numbers[request_id] = len(self._numbers)
        self.arrived_ns[number], self.num_prompt[number] = arrival_ns, num_prompt

    def seen(self, request_id: str, arrival_ns: int) -> None:
        """Set a request's arrival to the time when the scheduler saw the request."""
        self.arrived_ns[self._numbers[request_id]] = arrival_ns

    def dispatched(self, plan: StepPlan) -> None:
        self.num_scheduled_tokens += len(plan.input_ids)
        self.num_encoded += len(plan.encode)
        if not plan.admitted:
            return
        computed = dict(zip(plan.rows.tolist(), plan.num_computed.tolist(), strict=True))
        for admission in plan.admitted:
            self.admitted(admission.request.request_id, admission.row, computed[admission.row])

    def admitted(self, request_id: str, row: int, num_computed: int) -> None:
        """Record an admission. `num_computed`: number of tokens with KV when the request got its row."""
        number = self._by_row[row] = self._numbers[request_id]
        if self.num_cached[number] == NEVER:
            self.num_cached[number] = num_computed

    def collected(self, plan: StepPlan, result: StepResult, clock_ns: int) -> None:
        self.sampled(plan.rows[plan.sample], result.counts, clock_ns)

    def sampled(self, rows: np.ndarray, counts: np.ndarray | None, clock_ns: int) -> None:
        """Record that each row got `counts` tokens; None: one token each."""
        numbers = self._by_row[rows]
        counts = np.ones(len(numbers), np.int64) if counts is None else counts.astype(np.int64)
        if (over := self._over[numbers]).any():  # the request ended while this step ran
            numbers, counts = numbers[~over], counts[~over]
        self.num_output_tokens += int(counts.sum())
        first = self.first_ns[numbers] == NEVER
        self.first_ns[numbers[first]] = clock_ns
        gaps = (clock_ns - self._last_ns[numbers[~first]]) // counts[~first]
        self._gaps.append(np.repeat(gaps, counts[~first]))
        self._gap_owners.append(np.repeat(numbers[~first], counts[~first]))
        self._last_ns[numbers] = clock_ns

    def preempted(self) -> None:
        self.num_preemptions += 1

    def finished(self, request_id: str, reason: str, clock_ns: int) -> None:
        self.ends[reason] = self.ends.get(reason, 0) + 1
        self._over[self._numbers[request_id]] = True
        if reason in ANSWERED:
            self.end_ns[self._numbers[request_id]] = clock_ns

    def decided(self, state: State, num_tokens: int, clock_ns: int) -> None:
        line = self.timeline
        line.time_ns.append(clock_ns)
        line.running.append(len(state.running))
        line.waiting.append(len(state.waiting))
        line.kv_blocks.append(state.config.num_blocks - 1 - state.blocks.num_free)
        line.encoder.append(state.encoder.used - state.encoder.idle_size)
        line.tokens.append(num_tokens)

    def ttft(self, among: np.ndarray | None = None) -> Spread:
        """Return percentiles for the time from arrival to the first token. `among`: a bool mask for requests
        in arrival order; None: all.
        """
        return Spread.of((self.first_ns - self.arrived_ns)[_counting(self.first_ns, among)])

    def longest_ttft(self) -> int:
        """Return the longest time from arrival to the first token, in ns."""
        return int((self.first_ns - self.arrived_ns)[self.first_ns != NEVER].max(initial=0))

    def inter_token(self, among: np.ndarray | None = None) -> Spread:
        """Return percentiles for the time between successive tokens. If a step yields several tokens, the
        step's time is divided among these tokens. `among`: as in `ttft`.
        """
        if not self._gaps:
            return Spread()
        gaps = np.concatenate(self._gaps)
        return Spread.of(gaps if among is None else gaps[among[np.concatenate(self._gap_owners)]])

    def end_to_end(self, among: np.ndarray | None = None) -> Spread:
        """Return percentiles for the time from arrival to the end, for requests that ended by stop or length.
        `among`: as in `ttft`.
        """
        return Spread.of((self.end_ns - self.arrived_ns)[_counting(self.end_ns, among)])


def _counting(times: np.ndarray, among: np.ndarray | None) -> np.ndarray:
    there: np.ndarray = times != NEVER
    return there if among is None else there & among
