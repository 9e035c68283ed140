"""Collects each step's outputs (new tokens and ended requests) and counts an engine's events."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

import msgspec
import numpy as np

from mmengine.core.decide.stalls import NO_PROGRESS, THRASH
from mmengine.core.executor import PooledVector, PromptLogprobs
from mmengine.core.observer import Observer
from mmengine.core.state.blocks import hit_tokens
from mmengine.core.state.draft_counts import DraftCounts, StepDrafts
from mmengine.core.state.state import State
from mmengine.core.state.view import View
from mmengine.core.step_result import prompt_logprobs
from mmengine.errors import ErrorCode
from mmengine.events import vocabulary as ev
from mmengine.ragged import counting


class Output(msgspec.Struct, eq=False):
    """One request's new tokens, and its end if the request ended.

    `finish_reason`: stop, length, pooled, abort, error, rejected, or None while the request runs. `detail`:
    what stopped the text (eos, token, string), or the error. `code`: as in FINISHED. `num_cached_tokens`: how
    many prompt tokens were cached. `logprobs`: for each new token, pairs (token id, logprob) with the chosen
    token first; None if not requested. Further pairs may store the token's confidence (token_confidence.py).
    `num_drafts`: how many drafts the step verified for the request. `num_accepted`: how many new tokens are
    accepted drafts. `vector`: float32 [d], a pooled request's result.
    """

    request_id: str
    token_ids: list[int]
    finish_reason: str | None = None
    detail: str = ""
    num_cached_tokens: int = 0
    logprobs: list[tuple[tuple[int, float], ...]] | None = None
    num_drafts: int = 0
    num_accepted: int = 0
    prompt_logprobs: PromptLogprobs | None = None  # only with the first token, if the request wants them
    code: ErrorCode | None = None
    vector: np.ndarray | None = None


_NO_REQUESTS, _NO_TOKENS = np.zeros(0, object), np.zeros(0, np.int32)


class Outputs:
    """One step's outputs. Iteration yields an Output for each request that got tokens or ended."""

    def __init__(self) -> None:
        self._requests = _NO_REQUESTS  # array of RequestState
        self._tokens = _NO_TOKENS  # all tokens, in the order of `_requests`
        self._counts: np.ndarray | None = None  # number of tokens of each request; None: one token each
        # The keys of the next three dicts are indices into `_requests`.
        self._logprobs: dict[int, list[tuple[tuple[int, float], ...]]] = {}
        self._prompt_logprobs: dict[int, PromptLogprobs] = {}
        self._drafted: dict[int, tuple[int, int]] = {}  # (number of drafts, number of accepted drafts)
        self._ends: dict[str, tuple[ev.Finished, int]] = {}
        self._vectors: dict[str, np.ndarray] = {}  # request id -> vector, for pooled requests
        self.admitted: list[str] = []  # requests that got a row in this step

    def __bool__(self) -> bool:
        return bool(len(self._requests) or self._ends)

    def tokens(
        self,
        view: View,
        sampled: np.ndarray,
        taken: np.ndarray | None,
        event: ev.Executed,
        drafts: StepDrafts | None = None,
    ) -> None:
        """Add the tokens of the rows `sampled`. Call this method after `event` was applied to the state.

        `taken`: how many tokens each row got; 0 if the row failed or its request has left. None: one token
        for each row. `drafts`: the rows that had drafts. Tokens stay in arrays, because many lists would slow
        down the garbage collector.
        """
        self._requests = view.requests_by_row[sampled]
        self._tokens = np.frombuffer(event.token_ids, np.int32)
        if event.prompt_logprobs:
            places = range(len(sampled)) if taken is None else (np.cumsum(taken > 0) - 1).tolist()
            for found in prompt_logprobs(event):
                if taken is None or taken[found.row]:
                    self._prompt_logprobs[places[found.row]] = found
        if taken is None:
            self._logprobs = {index: [entry] for index, entry in event.logprobs}
            return
        if event.counts is not None:
            given = np.frombuffer(event.counts, np.int32)
            self._tokens = self._tokens[counting(given) < np.repeat(taken, given)]
            self._counts = taken
        kept = taken > 0
        if np.count_nonzero(kept) < len(kept):
            if self._counts is None:
                self._tokens = self._tokens[kept]
            else:
                self._counts = self._counts[kept]
            self._requests = self._requests[kept]
        if drafts is not None:
            some = kept[drafts.places]
            places = (np.cumsum(kept) - 1)[drafts.places[some]].tolist()
            counts = zip(drafts.proposed[some].tolist(), drafts.accepted[some].tolist(), strict=True)
            self._drafted = dict(zip(places, counts, strict=True))
        if event.logprobs:
            place = (np.cumsum(kept) - 1).tolist()
            for index, entry in event.logprobs:
                of_row = self._logprobs.setdefault(place[index], []) if kept[index] else []
                if len(of_row) < taken[index]:
                    of_row.append(entry)

    def vectors(self, view: View, pooled: Sequence[PooledVector]) -> None:
        """Add the vectors for the step's pooled requests. Requests that have left are skipped."""
        for found in pooled:
            req_state = view.requests_by_row[found.row]
            if req_state is not None and len(found.vector):
                self._vectors[req_state.request.request_id] = found.vector

    def finished(self, event: ev.Finished, num_cached: int) -> None:
        """Add a request's end. `num_cached`: how many prompt tokens were cached."""
        self._ends[event.request_id] = (event, num_cached)

    @property
    def ends(self) -> dict[str, tuple[ev.Finished, int]]:
        """Each ended request's FINISHED event and number of cached prompt tokens, by request id."""
        return self._ends

    def columns(self) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
        """Return (requests, tokens, counts) for the requests that got tokens.

        Requests: array of RequestState. Tokens: int32, in the order of the requests. Counts: tokens per
        request; None: one token each. Hosts such as vLLM make their own output objects from these arrays.
        """
        return self._requests, self._tokens, self._counts

    def __iter__(self) -> Iterator[Output]:
        ends = dict(self._ends)
        tokens = self._tokens.tolist()
        stops = range(1, len(tokens) + 1) if self._counts is None else np.cumsum(self._counts).tolist()
        start = 0
        for place, (req_state, stop) in enumerate(zip(self._requests.tolist(), stops, strict=True)):
            output = Output(
                req_state.request.request_id, tokens[start:stop], num_cached_tokens=req_state.num_cached
            )
            start = stop
            if place in self._logprobs:
                output.logprobs = self._logprobs[place]
            if place in self._prompt_logprobs:
                output.prompt_logprobs = self._prompt_logprobs[place]
            if place in self._drafted:
                output.num_drafts, output.num_accepted = self._drafted[place]
            end = ends.pop(output.request_id, None)
            if end is not None:
                output.finish_reason, output.detail = end[0].reason, end[0].detail
                output.code = end[0].code
            yield output
        for name, (event, num_cached) in ends.items():
            vector = self._vectors.get(name)
            yield Output(name, [], event.reason, event.detail, num_cached, code=event.code, vector=vector)


@dataclass(slots=True)
class Stats:
    """Counters since the engine was created, and current values: `num_running`, `num_waiting`,
    `sessions_open`, `kv_blocks_used` and `kv_blocks_leased`.

    `drafts`: drafter number -> counts. `overlap`: key -> number of steps, only with max_in_flight 2. The key
    "ahead" counts steps that were decided while another step ran. Each other key is a reason why a step
    waited for the previous step (core/state/overlap.py).
    """

    steps: int = 0
    num_finished: int = 0
    num_prompt_tokens: int = 0
    num_output_tokens: int = 0
    num_cached_tokens: int = 0
    num_looked_up_tokens: int = 0
    num_scheduled_tokens: int = 0
    num_preemptions: int = 0
    num_thrashes: int = 0
    num_no_progress: int = 0
    num_encoded_items: int = 0
    num_encoder_hits: int = 0
    num_fetched_blocks: int = 0  # blocks from a block store
    num_lost_fetches: int = 0  # fetches that ended before all their blocks arrived
    num_leases_taken: int = 0  # number of times that a session lost leased blocks
    sessions_open: int = 0
    kv_blocks_leased: int = 0
    device_ns: int = 0
    num_running: int = 0
    num_waiting: int = 0
    kv_blocks_used: int = 0
    kv_blocks_total: int = 0
    log_bytes: int = 0
    drafts: dict[int, DraftCounts] = field(default_factory=dict)
    overlap: dict[str, int] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        """Return the counters by name."""
        return {each.name: getattr(self, each.name) for each in fields(self)}


class OutputCollector(Observer):
    """Collects the current step's outputs. `outputs`: outputs that `take` has not returned yet."""

    def __init__(self, state: State):
        self._state, self.outputs = state, Outputs()

    def before(self, event: ev.Event) -> None:
        if isinstance(event, ev.Admitted):
            self.outputs.admitted.append(event.request_id)
        elif isinstance(event, ev.Finished):
            req_state = self._state.requests.get(event.request_id)
            self.outputs.finished(event, max(0, req_state.num_cached) if req_state else 0)

    def take(self) -> Outputs:
        """Return the outputs that were collected since the last call."""
        outputs, self.outputs = self.outputs, Outputs()
        return outputs


class StatsCounter(Observer):
    """Updates the counters in `stats` after each event."""

    def __init__(self, state: State, stats: Stats):
        self._state, self.stats = state, stats

    def after(self, event: ev.Event) -> None:
        stats = self.stats
        match event:
            case ev.Executed():
                stats.steps += 1
                stats.device_ns += event.device_ns
            case ev.Scheduled(encode=encode):
                stats.num_encoded_items += len(encode)
            case ev.Admitted(request_id=name, encode=encode):
                req_state = self._state.requests[name]
                stats.num_encoded_items += len(encode)
                stats.num_encoder_hits += len(req_state.held_media) - len(encode)
                stats.num_cached_tokens += hit_tokens(self._state, event)
                stats.num_looked_up_tokens += len(req_state.tokens)
            case ev.Encoded(request_id=name, index=index, until=until):
                stats.num_encoded_items += until >= self._state.requests[name].media_work[index]
            case ev.Arrived(digests=digests):
                stats.num_fetched_blocks += len(digests) // 8
            case ev.Lost():
                stats.num_lost_fetches += 1
            case ev.LeaseTaken():
                stats.num_leases_taken += 1
            case ev.Queued(prompt=prompt):
                stats.num_prompt_tokens += len(prompt) // 4
            case ev.Preempted():
                stats.num_preemptions += 1
            case ev.Stalled(kind=kind):
                stats.num_thrashes += kind == THRASH
                stats.num_no_progress += kind == NO_PROGRESS
            case ev.Finished():
                stats.num_finished += 1
