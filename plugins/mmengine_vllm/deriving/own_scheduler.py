"""Derives a log's decisions with vLLM's own scheduler instead of mmengine's rules."""

from collections import deque
from collections.abc import Callable
from importlib import import_module
from time import monotonic_ns

import numpy as np
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.outputs import DraftTokenIds
from vllm.v1.request import RequestStatus
from vllm.version import __version__

from mmengine.block_groups import log_order
from mmengine.config import EngineConfig
from mmengine.errors import LogError
from mmengine.events import vocabulary as ev
from mmengine.replay.hosted.engines import Ended, no_progress
from mmengine.replay.hosted.outcome import CALL_EVENTS, Difference, Outcome, RecordedRows
from mmengine.request import MediaItem
from mmengine_vllm.batches import events_of
from mmengine_vllm.contents import TokenIds
from mmengine_vllm.deriving import scheduler_alone
from mmengine_vllm.deriving.settings import check_version, settings_of
from mmengine_vllm.host_facts import not_derived
from mmengine_vllm.kv_groups import full_attention_group
from mmengine_vllm.recorder import Recorder
from mmengine_vllm.vllm_object import VllmObject

OWN = "vllm"
NONE: set[str] = set()
Tokens = dict[str, list[int]]
Image = tuple[str, str, int, int, list[bool] | None]
Sink = Callable[[list[tuple[ev.Event, int, int]]], None]


class LoggedIds(TokenIds):
    """Writes ids unchanged. A media item's identifier is its key in the log, in hexadecimal."""

    def digest(self, text: str) -> bytes:
        try:
            return bytes.fromhex(text)
        except ValueError:
            return super().digest(text)


def scheduler_class(name: str, *, is_async: bool) -> type:
    """Return vLLM's own scheduler class, or the class `name` (MODULE:CLASS). Raises LogError for an unknown
    class, and for a class that is no subclass of Scheduler.
    """
    if name == OWN:
        return AsyncScheduler if is_async else Scheduler
    module, _, attribute = name.partition(":")
    try:
        found = getattr(import_module(module), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        raise LogError(f"{name!r} is not a scheduler class ({error}); use vllm or MODULE:CLASS") from error
    if not isinstance(found, type) or not issubclass(found, Scheduler):
        raise LogError(f"{name} is not a subclass of vLLM's Scheduler")
    return found


class OwnScheduler:
    """Passes a log's observations to a vLLM scheduler without a model, and records the decisions. Implements
    HostEngine. `name`: as in `scheduler_class`. `sink`: called with the recorded events, in order. Raises
    LogError if the log comes from another version of vLLM.
    """

    def __init__(self, started: ev.Started, config: EngineConfig, name: str = OWN, sink: Sink | None = None):
        check_version(started, __version__)
        self.config, self.ends = config, deque[Ended]()
        self.settings = settings_of(config, started.fingerprints)
        self.scheduler = scheduler_alone.make_scheduler(
            scheduler_class(name, is_async=config.max_in_flight > 1), self.settings
        )
        self._hasher = scheduler_alone.block_hasher(self.scheduler)
        self._recorder = Recorder(
            LoggedIds(),
            num_rows=config.num_rows,
            block_size=config.block_size,
            overlaps=config.max_in_flight > 1,
            group=full_attention_group(self.scheduler),
            groups=log_order(config.block_groups),
            counts_blocks=bool(not_derived(self.scheduler)),
            has_drafts=config.num_draft_tokens > 0,
            has_adapters=config.max_loras > 0,
        )
        self._rows, self._sink = RecordedRows(config.block_size), sink
        self._flying = deque[tuple[SchedulerOutput, list[str]]]()
        self._number, self._adapters = 0, dict[str, int]()
        self.output = SchedulerOutput.make_empty()  # output of the last call

    @property
    def waiting(self) -> list[str]:
        """The ids of the waiting requests, in queue order."""
        return [request.request_id for request in self.scheduler.waiting]

    @property
    def step(self) -> int:
        """The number of the open step, or of the next step."""
        return self._recorder.step

    @property
    def has_flights(self) -> bool:
        return bool(self._flying)

    def observe(self, event: ev.Event) -> None:
        """Apply an arrival, a cancellation, a ready grammar or a cache reset, and record the requests that
        end.
        """
        scheduler = self.scheduler
        match event:
            case ev.Queued():
                request = self._request(event)
                scheduler.add_request(request)
                self._recorder.added(request)
            case ev.Cancelled(request_id=name, reason=reason):
                status = RequestStatus.FINISHED_ABORTED
                if reason.upper() in RequestStatus.__members__:
                    status = RequestStatus[reason.upper()]
                self._recorder.finished(scheduler.finish_requests([name], status))
            case ev.GrammarReady(request_id=name) if name in scheduler.requests:
                scheduler.requests[name].structured_output_request.grammar = True
            case ev.CacheReset(preempt_running=preempts):
                running = list(scheduler.running)
                scheduler.reset_prefix_cache(reset_running_requests=preempts)
                self._recorder.reset(running, preempts=preempts)
        self._note_ends()

    def note(self, event: ev.Noted) -> bool:
        """Apply the call in a NOTED event, such as a pause. Return whether later decisions can still be
        derived.
        """
        if event.kind == "pause" and event.detail in PauseState.__members__:
            self.scheduler.set_pause_state(PauseState[event.detail])
            return True
        if event.kind == "encoder cache reset":
            self.scheduler.reset_encoder_cache()
            return True
        return event.kind == "stall"

    def draft(self, event: ev.Drafted, names: list[str]) -> None:
        """Pass a drafter's result to the scheduler."""
        counts = np.frombuffer(event.num_drafts, np.int32).tolist()
        drafts = np.frombuffer(event.drafts, np.int32).tolist()
        ends = np.cumsum(counts).tolist()
        self.give_drafts(names, [drafts[end - n : end] for end, n in zip(ends, counts, strict=True)])

    def give_drafts(self, names: list[str], drafts: list[list[int]]) -> None:
        """Pass drafts to the scheduler, one list per request."""
        given = DraftTokenIds(names, drafts)
        self.scheduler.update_draft_token_ids(given)
        self._recorder.drafted(given, self.scheduler)
        self._drain()

    def schedule(self) -> Outcome:
        """Call the scheduler once, and return its decisions."""
        output = self.scheduler.schedule()
        self.output = output
        names = scheduler_alone.sampling_requests(self.scheduler, output)
        self._recorder.scheduled(output, self.scheduler, monotonic_ns())
        flying = self._recorder.in_flight
        if flying and flying[-1].output is output:
            self._flying.append((output, names))
        return self._rows.outcome(event for event in self._drain() if isinstance(event, CALL_EVENTS))

    def dispatch(self) -> None:
        """Do nothing: an asynchronous step is closed when it is scheduled."""

    def drop_empty_step(self) -> None:
        """Apply an empty result if the oldest step in flight only preempted requests. With asynchronous
        scheduling, do nothing, because the log contains this result.
        """
        is_empty = self._flying and not self._flying[0][0].total_num_scheduled_tokens
        if is_empty and self.config.max_in_flight == 1:
            self.collect(ev.Executed(b""))

    def collect(self, result: ev.Executed | ev.Failed) -> None:
        """Apply the oldest step's result, and record the requests that end. Raises ValueError for a result
        that does not fit the step.
        """
        if isinstance(result, ev.Failed):
            raise ValueError("vLLM's scheduler has no call for a step that failed")
        if not self._flying:
            raise ValueError("no step is in flight")
        output, names = self._flying[0]
        tokens = _tokens(result, names)
        stops = {names[place]: tokens[names[place]][-1:] for place, _ in result.stops}
        self.update(output, tokens, stops, {names[place] for place, _ in result.errors})

    def update(
        self, output: SchedulerOutput, tokens: Tokens, stops: Tokens | None = None, errors: set[str] = NONE
    ) -> None:
        """Pass the oldest step's tokens to the scheduler. `stops`: the tokens that end requests. `errors`:
        requests whose tokens violate their grammar.
        """
        if self._flying and self._flying[0][0] is output:
            self._flying.popleft()
        for name, last in (stops or {}).items():
            if name in self.scheduler.requests:
                self.scheduler.requests[name].sampling_params.stop_token_ids = last
        runner = scheduler_alone.runner_output(output, tokens)
        self.scheduler.structured_output_manager.refused = errors
        self.scheduler.update_from_output(output, runner)
        self._recorder.executed(output, runner, self.scheduler, monotonic_ns())
        self._note_ends()

    def left_over(self) -> list[str]:
        """Return the ids of the requests that the next call schedules, or [] while a step is in flight."""
        self.drop_empty_step()
        return [] if self._flying else [name for name, _ in self.schedule().rows]

    def stalled(self) -> str:
        """Return a text if requests wait although no step is in flight and KV blocks are free, else ""."""
        scheduler = self.scheduler
        free = scheduler.kv_cache_manager.block_pool.get_num_free_blocks()
        if self._flying or not free or not scheduler_alone.could_run(scheduler):
            return ""
        running = len(scheduler.running)
        return no_progress(running, len(scheduler.requests) - running, free, self.config.num_blocks)

    def rule_of(self, found: Difference, logged: Outcome, derived: Outcome, waiting: list[str]) -> str:
        """Return "", because none of mmengine's rules is involved."""
        return ""

    def _drain(self) -> list[ev.Event]:
        """Return the recorder's events since the last call, after passing them to `sink`."""
        recorder = self._recorder
        entries, recorder.entries = recorder.entries, []
        events = events_of(entries, recorder.contents, recorder.order)
        if self._sink is not None:
            self._sink(events)
        return [event for event, _, _ in events]

    def _note_ends(self) -> None:
        self.ends += [event for event in self._drain() if isinstance(event, (ev.Finished, ev.Preempted))]

    def _request(self, event: ev.Queued) -> VllmObject:
        sampling, self._number = event.sampling, self._number + 1
        return scheduler_alone.make_request(
            event.request_id,
            np.frombuffer(event.prompt, np.int32).tolist(),
            max(1, sampling.max_tokens),
            self._hasher,
            images=[image_of(item) for item in event.media],
            lora=adapter_of(event, self._adapters),
            grammar=event.grammar is not None,
            priority=event.priority,
            cache_salt=event.cache_salt or None,
            arrival_time=self._number,
        )


def adapter_of(event: ev.Queued, numbers: dict[str, int]) -> tuple[str, int] | None:
    """Return a request's adapter as (name, number), or None. `numbers`: numbers of earlier adapters."""
    if event.adapter is None:
        return None
    name = event.adapter.digest.hex()
    return name, numbers.setdefault(name, len(numbers) + 1)


def image_of(item: MediaItem) -> Image:
    """Return an item as an element of scheduler_alone.make_request's argument `images`. The start and length
    cover all tokens from the item's first embedding to the last embedding.
    """
    start, end = item.runs[0][0], sum(item.runs[-1])
    mask = None
    if len(item.runs) > 1:
        mask = [False] * (end - start)
        for first, length in item.runs:
            mask[first - start : first - start + length] = [True] * length
    return item.mm_hash.hex(), item.modality, start, end - start, mask


def _tokens(result: ev.Executed, names: list[str]) -> Tokens:
    """Return each request's tokens. Raises ValueError if the token count does not fit the step."""
    tokens = np.frombuffer(result.token_ids, np.int32).tolist()
    counts = [1] * len(names)
    if result.counts is not None:
        counts = np.frombuffer(result.counts, np.int32).tolist()
    if len(counts) != len(names) or sum(counts) != len(tokens):
        raise ValueError(f"token_ids has {len(tokens)} tokens in {len(counts)} rows, but {len(names)} sample")
    ends = np.cumsum(counts).tolist()
    return {name: tokens[end - count : end] for name, end, count in zip(names, ends, counts, strict=True)}
