"""Records the calls of vLLM's scheduler, and tracks requests' rows and steps in flight. Does not import vLLM.

Every method takes the arguments or the result of a public scheduler method, and appends the entries that
entries.py defines. A step with the same rows as the previous step creates no object per row.
"""

from collections import deque
from collections.abc import Iterable
from itertools import chain
from time import monotonic_ns

from mmengine.errors import ErrorCode
from mmengine.events import vocabulary as ev
from mmengine_vllm.columns import int32_bytes, int64_bytes
from mmengine_vllm.contents import PseudoIds
from mmengine_vllm.entries import (
    NO_ROW,
    Admission,
    Arrival,
    Decision,
    Drafts,
    Entry,
    Preemption,
    Result,
    Stamped,
    Step,
    Tracked,
)
from mmengine_vllm.kv_groups import by_number, split_blocks
from mmengine_vllm.request_facts import queued_of
from mmengine_vllm.results import Tokens, ends_of, has_ended, tokens_of
from mmengine_vllm.rows import Rows, StepRows, find_row
from mmengine_vllm.runner_order import RunnerOrder
from mmengine_vllm.vllm_object import VllmObject

RESET = "the prefix cache was reset"


class UnknownCall(Exception):
    """vLLM made a call that no event describes. The error's text names the call."""


class Recorder:
    """Collects entries (see entries.py) about one scheduler.

    `group`: the KV group whose blocks are recorded. `groups`: if not empty, several KV groups to record
    instead, in the order of the log's block groups. `counts_blocks`: whether entries contain each row's
    number of new blocks, for schedulers in which the row's tokens do not determine this number. `hides`:
    whether the log omits user content.
    """

    def __init__(
        self, contents: PseudoIds, *, num_rows: int, block_size: int, overlaps: bool, group: int = 0,
        groups: tuple[int, ...] = (), counts_blocks: bool = False, hides: bool = True,
        has_drafts: bool = False, has_adapters: bool = False,
    ):  # fmt: skip
        self.contents = contents
        self.entries: list[Stamped] = []
        self.requests: dict[str, Tracked] = {}
        self.rows = Rows(num_rows)
        self.in_flight: deque[Step] = deque()
        self.step = 0  # the open step, or the next step
        self._step_rows, self.order = StepRows(self.rows), RunnerOrder()
        self._received: Tokens | None = None  # tokens of the current update
        self._stale: list[tuple[int, int, Tracked]] = []  # (step, row, request preempted during the step)
        self._waiting_grammars: dict[str, Tracked] = {}
        self.encoded: set[bytes] = set()  # keys in the encoder cache
        self._last_update_ns = 0  # time at which the last update ended
        self.progress_ns = monotonic_ns()  # time at which a row last got a token
        self.is_paused = False
        self._size, self.overlaps, self.group, self.hides = block_size, overlaps, group, hides
        self.groups = groups
        self._counts_blocks, self._has_drafts, self.has_adapters = counts_blocks, has_drafts, has_adapters

    @property
    def num_running(self) -> int:
        """The number of requests that have a row."""
        return len(self.rows)

    def paused(self, state: VllmObject) -> None:
        """Record a call of `set_pause_state`."""
        name = getattr(state, "name", str(state))
        self.is_paused = name != "UNPAUSED"
        self.note("pause", name)

    def note(self, kind: str, detail: str = "") -> None:
        """Record a call that no other event describes."""
        self._append(ev.Noted(kind, detail))

    def _append(self, entry: Entry) -> None:
        self.entries.append((entry, self.step, monotonic_ns()))

    def added(self, request: VllmObject) -> None:
        """Record a request that was added to the scheduler."""
        name = request.request_id
        if name in self.requests:
            raise UnknownCall(f"request {name} got another prompt (a streaming session)")
        queued = queued_of(request, self.contents, hides=self.hides)
        tracked = Tracked(request, queued)
        tokens, salt = request.prompt_token_ids, request.cache_salt or ""
        if tokens is None:  # the prompt consists of embeddings, which no other prompt shares
            tokens, salt = [0] * request.num_prompt_tokens, name
        self.requests[name] = tracked
        if tracked.waits_for_grammar:
            self._waiting_grammars[name] = tracked
        self._append(Arrival(queued, int64_bytes(tokens), salt, tracked))

    def finished(self, returned: Iterable[VllmObject] | None) -> None:
        """Record the requests that `finish_requests` returned, in the same order."""
        for item in returned or ():
            request = item if hasattr(item, "request_id") else None
            name = item[0] if request is None else request.request_id
            tracked = self.requests.get(name)
            if tracked is None:
                continue
            status = tracked.request.status.name
            reason = "cancelled" if status == "FINISHED_ABORTED" else status.lower()
            self._append(ev.Cancelled(name, reason))
            self._append(ev.Finished(name, "abort", reason, ErrorCode.CANCELLED))
            self._forget(name, tracked)

    def _forget(self, name: str, tracked: Tracked) -> None:
        del self.requests[name]
        self._waiting_grammars.pop(name, None)
        self._take_row(name, tracked)

    def _take_row(self, name: str, tracked: Tracked) -> None:
        tracked.row = NO_ROW
        self.rows.take(name, reversed(self.in_flight))

    # Steps

    def scheduled(self, output: VllmObject, scheduler: VllmObject, began_ns: int) -> None:
        """Record the result of the scheduler's `schedule`. `began_ns`: when `schedule` was called."""
        counts = output.num_scheduled_tokens
        if self._waiting_grammars:
            self._see_grammars()
        if output.preempted_req_ids:
            self._preempt(output.preempted_req_ids, scheduler.waiting)
        if output.free_encoder_mm_hashes or output.scheduled_encoder_inputs:
            self._evict(output)
        ids = list(counts)
        cached = output.scheduled_cached_reqs
        num_running = len(ids) - len(output.scheduled_new_reqs) - len(cached.resumed_req_ids)
        if not ids and not (self.entries and isinstance(self.entries[-1][0], Preemption)):
            return  # the call made no decision
        rows, num_admitted = b"", len(ids) - num_running
        if num_running or not ids:
            rows = self._schedule_running(output, ids, num_running)
        if num_admitted:
            rows += int32_bytes(self._admit(output, ids[num_running:]))
        now = monotonic_ns()
        self.in_flight.append(Step(self.step, output, ids, rows, num_admitted, now, now - began_ns))
        self._step_rows.decided(ids, rows)
        if self.overlaps:
            self._append(ev.Dispatched())
            self.step += 1

    def _schedule_running(self, output: VllmObject, ids: list[str], num_running: int) -> bytes:
        """Record SCHEDULED for the first `num_running` requests, and return their rows as int32 bytes."""
        counts = output.num_scheduled_tokens
        given = output.scheduled_cached_reqs.new_block_ids
        running, new = ids, 0
        if num_running != len(ids):
            running = ids[:num_running]
            new = sum(map(counts.__getitem__, ids[num_running:]))
        if num_running != len(given):
            given = given[:num_running]
        rows, same = self._step_rows.column(running)
        num_tokens = None
        if output.total_num_scheduled_tokens - new != num_running:
            num_tokens = list(map(counts.__getitem__, running))
        group = self.group
        if self.groups:
            blocks = by_number(filter(None, given), self.groups)
        else:
            blocks = [block for each in filter(None, given) for block in each[group]]
        block_counts = None
        if self._counts_blocks and blocks:
            block_counts = [0 if each is None else len(each[group]) for each in given]
        num_drafts = None
        if drafts := output.scheduled_spec_decode_tokens:
            num_drafts = [len(drafts.get(name, ())) for name in running]
            num_drafts = num_drafts if any(num_drafts) else None
        encode: tuple[tuple[bytes, int, int], ...] = ()
        if output.scheduled_encoder_inputs:
            encode = tuple(chain.from_iterable(self._encode_of(output, name) for name in running))
        self._append(Decision(None if same else rows, num_tokens, blocks, encode, num_drafts, block_counts))
        return rows

    def _admit(self, output: VllmObject, names: list[str]) -> list[int]:
        """Record ADMITTED for the requests, and return their rows."""
        cached = output.scheduled_cached_reqs
        given = {new.req_id: (new.block_ids, new.num_computed_tokens) for new in output.scheduled_new_reqs}
        if cached.resumed_req_ids:
            columns = zip(cached.req_ids, cached.new_block_ids, cached.num_computed_tokens, strict=True)
            given.update(
                (name, (blocks, computed))
                for name, blocks, computed in columns
                if name in cached.resumed_req_ids
            )
        rows = []
        for name in names:
            blocks, computed = given[name]
            tracked = self.requests[name]
            row = tracked.row = self.rows.give(name)
            rows.append(row)
            hits = computed // self._size
            cached, new = split_blocks(blocks, hits, self.groups or (self.group,))
            kind = ev.AdmittedWithAdapter if tracked.has_adapter and self.has_adapters else ev.Admitted
            event = kind(
                name,
                row,
                output.num_scheduled_tokens[name],
                int32_bytes(cached),
                int32_bytes(new),
                encode=self._encode_of(output, name) if output.scheduled_encoder_inputs else (),
                num_computed=ev.AS_CACHED if computed == hits * self._size and not self.groups else computed,
            )
            self._append(Admission(event, tracked))
        return rows

    def _encode_of(self, output: VllmObject, name: str) -> tuple[tuple[bytes, int, int], ...]:
        """Return the request's items that the step encodes, in SCHEDULED's form: (key, row, index)."""
        tracked = self.requests[name]
        indices = output.scheduled_encoder_inputs.get(name, ())
        return tuple((tracked.media[index].mm_hash, tracked.row, index) for index in indices)

    def _evict(self, output: VllmObject) -> None:
        """Record EVICTED for encoder outputs that vLLM freed. This includes outputs that are freed and
        encoded again in the same step, which vLLM does not report.
        """
        gone = [self.contents.digest(name) for name in output.free_encoder_mm_hashes]
        again = [
            self.requests[name].media[index].mm_hash
            for name, indices in output.scheduled_encoder_inputs.items()
            for index in indices
        ]
        keys = tuple(key for key in dict.fromkeys((*gone, *again)) if key in self.encoded)
        self.encoded.difference_update(keys)
        self.encoded.update(again)
        if keys:
            self._append(ev.Evicted(keys))

    def _preempt(self, names: Iterable[str], waiting: Iterable[VllmObject]) -> None:
        lost = [name for name in names if name in self.rows]
        if len(lost) > 1:
            behind = {
                request.request_id: place
                for place, request in enumerate(waiting)
                if request.request_id in lost
            }
            lost.sort(key=lambda name: -behind.get(name, 0))
        for name in lost:
            self._lose_row(name, "no free blocks")

    def _lose_row(self, name: str, reason: str) -> None:
        tracked = self.requests[name]
        row = tracked.row
        self._append(Preemption(ev.Preempted(name, row, "recompute", reason), tracked))
        if reason != RESET:  # after a reset, vLLM drops the tokens in flight
            steps = (step.number for step in self.in_flight if name in step.output.num_scheduled_tokens)
            self._stale += [(number, row, tracked) for number in steps]
        self._take_row(name, tracked)

    def _see_grammars(self) -> None:
        for name, tracked in list(self._waiting_grammars.items()):
            if tracked.request.status.name != "WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR":
                del self._waiting_grammars[name]
                self._append(ev.GrammarReady(name))

    def received(self, output: VllmObject, result: VllmObject) -> None:
        """Read the tokens of a model runner's result before `update_from_output`, while the CPU's cache still
        contains them. With drafts, do nothing, because `update_from_output` may shorten the lists of tokens.
        """
        self._received = None
        if self.in_flight and self.in_flight[0].output is output and not self._has_drafts:
            self._received = tokens_of(self.in_flight[0], result, has_drafts=False)

    def executed(self, output: VllmObject, result: VllmObject, scheduler: VllmObject, began_ns: int) -> None:
        """Record a step's result after `update_from_output`, which began at `began_ns`."""
        if not self.in_flight or self.in_flight[0].output is not output:
            return  # the call of `schedule` made no decision
        step = self.in_flight.popleft()
        got, self._received = self._received, None
        if got is None:
            got = tokens_of(step, result, has_drafts=self._has_drafts)
        ended = self._ended(step, scheduler)
        step.output = None
        stops, errors, events = ends_of(ended, got.places)
        now = monotonic_ns()
        device_ns = max(0, began_ns - max(step.decided_ns, self._last_update_ns))
        self._last_update_ns = now
        if got.tokens:
            self.progress_ns = now
        stale = self._stale_in(step.number) if self._stale else ()
        entry = Result(
            step, got.rows, got.tokens, got.counts, got.names, stops, errors, device_ns, step.host_ns, stale
        )
        self.entries.append((entry, step.number, now))
        if not self.overlaps:
            self.step += 1
        self.rows.land(step.number)
        for event in events:
            self._append(event)
            self._forget(event.request_id, self.requests[event.request_id])

    def _stale_in(self, number: int) -> tuple[tuple[int, Tracked], ...]:
        """Return (row, request) for the requests that were preempted while step `number` ran."""
        found = tuple((row, tracked) for step, row, tracked in self._stale if step == number)
        self._stale = [each for each in self._stale if each[0] != number]
        return found

    def _ended(self, step: Step, scheduler: VllmObject) -> list[tuple[int, VllmObject]]:
        """Return (index in the step, request) for requests that `update_from_output` ended, in step order."""
        live, known = scheduler.requests, self.requests
        if scheduler.connector is not None:  # the connector keeps ended requests until their blocks are sent
            return [
                (place, known[name].request)
                for place, name in enumerate(step.ids)
                if name in known and has_ended(live, name)
            ]
        if len(live) == len(known):
            return []
        # vLLM's own set of ended requests is small. Versions without this set need a comparison of all names.
        ended = [
            name for name in getattr(scheduler, "finished_req_ids", ()) if name in known and name not in live
        ]
        if len(ended) != len(known) - len(live):
            ended = [*known.keys() - live.keys()]
        scheduled = step.output.num_scheduled_tokens
        places = sorted(_place_of(name, known[name].row, step) for name in ended if name in scheduled)
        return [(place, known[step.ids[place]].request) for place in places]

    def drafted(self, drafts: VllmObject, scheduler: VllmObject) -> None:
        """Record the drafts for the next step, as the scheduler stored them in its requests."""
        live = scheduler.requests
        pairs = [
            (row, live[name].spec_token_ids)
            for name in drafts.req_ids
            if (row := self.rows.row_of(name)) != NO_ROW and live[name].spec_token_ids
        ]
        if pairs:
            rows, kept = zip(*pairs, strict=True)
            tokens = list(chain.from_iterable(kept))
            self._append(Drafts(int32_bytes(rows), tokens, list(map(len, kept))))

    def forget_encoded(self) -> None:
        """Record that all encoder outputs were dropped. Raises UnknownCall if a running request has media."""
        if any(tracked.media for name, tracked in self.requests.items() if name in self.rows):
            raise UnknownCall("the encoder cache was reset while requests with media were running")
        self.note("encoder cache reset")
        if self.encoded:
            self._append(ev.Evicted(tuple(self.encoded)))
            self.encoded.clear()

    def reset(self, running: list[VllmObject], *, preempts: bool) -> None:
        """Record that the prefix cache was reset. `running`: the requests that were running before the
        call.
        """
        preempts = preempts and bool(running)
        self._append(ev.CacheReset(preempts))
        if preempts:
            for request in reversed(running):
                self._lose_row(request.request_id, RESET)


def _place_of(name: str, row: int, step: Step) -> int:
    """Return a request's index in a step. `row`: the request's row, or NO_ROW if the request has lost its row
    since the step.
    """
    place = find_row(step.rows, row)
    return place if place >= 0 and step.ids[place] == name else step.ids.index(name)
