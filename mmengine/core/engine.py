"""The engine's loop, for live serving, simulation and replay.

    collect ─► EXECUTED ─► complete ─► FINISHED* ─► arrivals ─► schedule ─► SCHEDULED, ADMITTED*
       ▲                                                                            │
       └── dispatch ◄── one write of all events to the log ◄────────────────────────┘

Live serving, simulation and replay differ only in the executor, the source of observations, and the sink for
events. The log gets all events of a step before the executor gets the step's batch, and before callers get
tokens.

With max_in_flight 2, the loop decides the next step while a step runs. If a decision depends on the running
step's result, the loop waits (core/state/overlap.py). With max_in_flight 2, DISPATCHED ends a step's
decisions in the log.
"""

import time
from collections.abc import Callable
from typing import ClassVar

from mmengine.config import EngineConfig
from mmengine.core.batch import Planner
from mmengine.core.decide.completion import complete
from mmengine.core.decide.deciders import scheduler_of
from mmengine.core.decide.leases import next_lease
from mmengine.core.decide.request_checks import accept, check_request
from mmengine.core.decide.stalls import NO_PROGRESS, find_stalls
from mmengine.core.dispatched_steps import DispatchedSteps
from mmengine.core.executor import NO_PLAN, Executor
from mmengine.core.first_events import queued_as_logged, started_of
from mmengine.core.fold.evolve import evolve
from mmengine.core.inbox import Inbox, Source
from mmengine.core.observer import Observers
from mmengine.core.outputs import OutputCollector, Outputs, Stats, StatsCounter
from mmengine.core.remote_blocks import RemoteBlocks
from mmengine.core.session_manager import SessionManager
from mmengine.core.snapshot import snapshot
from mmengine.core.snapshot_writer import SnapshotWriter
from mmengine.core.state import overlap
from mmengine.core.state.digest import checkpoint
from mmengine.core.state.draft_counts import add_drafts, count_drafts
from mmengine.core.state.state import State
from mmengine.core.state.view import View
from mmengine.core.step_result import writable
from mmengine.core.store_fetches import StoreFetches
from mmengine.core.undelivered_answers import UndeliveredAnswers
from mmengine.errors import MMEngineError, QueueFull, id_in_use
from mmengine.events import vocabulary as ev
from mmengine.events.log import MemoryLog
from mmengine.events.sink import Sink
from mmengine.events.snapshots import SnapshotFolder
from mmengine.request import Request


class EngineCore:
    """Owns one engine's state and runs its loop. Only one thread may call its methods, unless noted.

    `config`: settings with known max_model_len and num_blocks. `started`, `state`: the first event and the
    state of a log that this engine replays or continues. To continue a log, call `recover` next.
    `snapshots`: the folder for state snapshots. `undelivered`: the continued log's answers that no caller
    received yet; snapshots contain them. `remote`: the client of a block store. Raises ConfigError for
    settings that contradict each other.
    """

    is_host_driven: ClassVar[bool] = False
    planner_class: ClassVar[type[Planner]] = Planner

    def __init__(
        self,
        config: EngineConfig,
        executor: Executor,
        *,
        sink: Sink | None = None,
        source: Source | None = None,
        fingerprints: dict[str, str] | None = None,
        clock: Callable[[], int] = time.monotonic_ns,
        started: ev.Started | None = None,
        state: State | None = None,
        snapshots: SnapshotFolder | None = None,
        undelivered: UndeliveredAnswers | None = None,
        remote: RemoteBlocks | None = None,
    ):
        if started is None:
            config.check_resolved()
        self.config = config
        self._scheduler = scheduler_of(config)
        self.executor = executor
        self.state = state if state is not None else State(config)
        self.view = View(self.state)
        self.sink = sink if sink is not None else MemoryLog()
        self.inbox = Inbox(clock)
        self._source: Source = source if source is not None else self.inbox
        self._clock, self._now = clock, 0
        self._is_decided = False  # a step is decided and not dispatched yet
        self._plan = NO_PLAN  # the plan of that step
        self._overlaps = config.max_in_flight > 1
        self._planner = self.planner_class(keeps=not self._overlaps)
        self._collect_first = False
        self._waited_for = overlap.ALONE  # why the next step was not decided while a step ran
        self._is_committed = True  # whether all events of the last steps are in the log
        self._collector = OutputCollector(self.state)
        self._stats = Stats(kv_blocks_total=config.num_blocks - 1)
        if self._overlaps:
            self._stats.overlap = dict.fromkeys(overlap.HOW, 0)
        # (step number, the stall found after this step)
        self.last_stall: tuple[int, ev.Stalled] | None = None
        self.sessions = SessionManager(config, self.state, self.inbox, self._acceptable)
        self._store = None if remote is None else StoreFetches(remote, self.state, self.inbox)
        if state is None and snapshots is not None:
            undelivered = UndeliveredAnswers(self.state)
        if undelivered is not None:
            undelivered.sequence = self.sink.next_sequence - 1
        optional = [one for one in (self._store, undelivered) if one is not None]
        counter = StatsCounter(self.state, self._stats)
        self._observers = Observers([self.sessions, *optional, self._collector, counter, self.inbox])
        self._started = started or started_of(config, fingerprints or {}, self.is_host_driven)
        self._snapshots: SnapshotWriter | None = None
        if snapshots is not None:
            self._snapshots = SnapshotWriter(snapshots, self.state, self._started, self.sink, undelivered)
        num_steps = 0
        if state is None:
            self._emit(self._started)
        else:  # a replay may begin at a snapshot that was taken while steps were in flight
            num_steps = len(state.flights) if self._overlaps else int(state.is_open)
        self._dispatched = DispatchedSteps(executor, num_steps)

    # Calls of consumers

    def submit(self, request: Request) -> None:
        """Put a request into the inbox. The next step adds the request to the waiting queue.

        Raises InvalidRequest if the request could never run or its id is in use, QueueFull if too many
        requests wait, and MMEngineError while the log cannot be written.
        """
        check_request(request, self.config)
        self.inbox.put(self._acceptable(request))

    def _acceptable(self, request: Request) -> ev.Queued:
        name = request.request_id
        if name in self.state.requests or name in self.inbox.queued:
            raise id_in_use(name)
        if len(self.state.waiting) + len(self.inbox.queued) >= self.config.max_waiting:
            raise QueueFull(f"{self.config.max_waiting} requests wait already (max_waiting); try again later")
        if self.stalled:
            raise MMEngineError(f"no new requests: {self.stalled}")
        return queued_as_logged(request)

    def cancel(self, request_id: str, reason: str = "cancelled") -> None:
        """Cancel a request. A later step returns the request's last output. Unknown ids are ignored."""
        self.inbox.put(ev.Cancelled(request_id, reason))

    def delivered(self, request_id: str) -> None:
        """Record that the consumer received the whole answer."""
        self.inbox.put(ev.Delivered(request_id))

    def grammar_ready(self, request_id: str) -> None:
        """Record that a waiting request's grammar is compiled."""
        self.inbox.put(ev.GrammarReady(request_id))

    def grammar_failed(self, request_id: str, detail: str) -> None:
        """Record that a waiting request's grammar failed to compile. The request ends with an error."""
        self.inbox.put(ev.GrammarFailed(request_id, writable(detail)))

    def reset_prefix_cache(self, *, preempt_running: bool = False) -> None:
        """Empty the prefix cache before the next step. With `preempt_running`, running requests are preempted
        and recomputed.
        """
        self.inbox.put(ev.CacheReset(preempt_running))

    def recover(self, event: ev.Recovered, cause: str = "") -> None:
        """Continue from the state of a process that has ended. The process's steps in flight are lost.

        `cause`: the error if the oldest of these steps ended the process, else "". The time limit of each
        request starts again.
        """
        if cause and self._dispatched:
            self._emit(ev.Failed(writable(cause)))
        self._is_decided, self._plan = False, NO_PLAN
        self._collector.take()
        self._dispatched.forget()
        self._collect_first = False
        self._emit(event)
        for name, req_state in self.state.requests.items():
            self.inbox.expect(name, req_state.request.deadline_ns)
        self.sessions.recovered()

    @property
    def has_work(self) -> bool:
        return bool(
            self.state.requests
            or self._source
            or self._collector.outputs
            or self._dispatched
            or self._is_decided
        )

    @property
    def fingerprints(self) -> dict[str, str]:
        """The model's fingerprints in the log's first event."""
        return self._started.fingerprints

    @property
    def awaits_grammars(self) -> bool:
        """Whether all requests wait for a grammar that is being compiled or for a block store's reply."""
        return bool(self.state.requests) and not (self._dispatched or self._is_decided or self._source)

    def is_on_disk(self, request_id: str) -> bool:
        """Return whether the log contains the request's QUEUED. A later process can then answer the request
        if this process dies. Call this method only after a step. The request may have ended.
        """
        return self._is_committed and request_id not in self.inbox.queued

    @property
    def is_committed(self) -> bool:
        """Whether the log contains all events of the last step."""
        return self._is_committed

    @property
    def stalled(self) -> str:
        """The reason why the log cannot be written, or ""."""
        return self.sink.stalled

    def stats(self) -> Stats:
        state, stats = self.state, self._stats
        stats.num_running, stats.num_waiting = len(state.running), len(state.waiting)
        stats.sessions_open, stats.kv_blocks_leased = len(state.sessions), state.sessions.num_leased
        stats.kv_blocks_used = stats.kv_blocks_total - state.blocks.num_free
        stats.log_bytes = self.sink.num_bytes
        return stats

    def sync(self) -> None:
        """Sync the log to the disk."""
        self.sink.sync()

    def close(self) -> None:
        """Write the last records, then close the log and the executor. Raises LogError if the log cannot be
        written.
        """
        try:
            # Only deliveries are written, because no step follows that could process other observations.
            for observation in self.inbox.drain():
                if isinstance(observation, ev.Delivered):
                    self.record_delivered(observation)
            self.checkpoint()
            if self._snapshots is not None and not self.stalled:
                self._snapshots.flush()
            self.sink.close()
        finally:
            self.executor.close()

    def record_delivered(self, delivered: ev.Delivered) -> None:
        """Record that an answer was delivered. Steps may be in flight."""
        self._emit(delivered)

    # The loop

    def hang(self, text: str) -> bool:
        """Record that the executor hangs in the oldest step. `text`: the error. Returns False, without
        effect, if no thread waits for the executor.

        Any thread may call this method. The core must not be used afterwards. If the executor returns late,
        the thread that waited for it exits.
        """
        if not self._dispatched.stop_waiting():
            return False
        self._emit(ev.Failed(writable(text)))
        return self.sink.commit()

    def step(self) -> Outputs:
        """Finish a step in flight, decide the next step, log both steps' events, and dispatch the next step.

        Returns the finished step's outputs. While the log cannot be written, no step starts and the outputs
        are kept for a later call. Raises ExecutorLost if the executor cannot run further steps. Another
        process can then continue the requests from the log.
        """
        if not self._is_decided and not self._collector.outputs:
            self._advance()
        return self._commit_and_dispatch()

    def _advance(self) -> None:
        if not self._collect_first and len(self._dispatched) < 1 + self._overlaps:
            self._process_arrivals()
            if self._decide() or not self._dispatched:
                return
            self._collect_first = True  # if the wait is interrupted, the next call collects before deciding
            self._waited_for = self._scheduler.why_it_waits(self.view)
        if self._scheduler.ends_leavers_first:
            self._end_leavers()
        self._collect()
        self._collect_first = False
        self._process_arrivals()
        self._decide()

    def _end_leavers(self) -> None:
        """End requests that were cancelled while the step ran. vLLM's scheduling rules end these requests
        before the step's tokens are applied.
        """
        for observation in self._source.leavers():
            for event in accept(self.view, observation):
                self._emit(event)
            for end in complete(self.view):
                self._emit(end)

    def _process_arrivals(self) -> None:
        """Record changes of block leases, finish requests that are complete, and process arrivals."""
        while (lease := next_lease(self.view)) is not None:
            self._emit(lease)
        for end in complete(self.view):
            self._emit(end)
        changed = False
        for observation in self._source.drain():
            changed = True
            for event in accept(self.view, observation):
                self._emit(event)
        if changed:
            for end in complete(self.view):
                self._emit(end)
        if self.state.step - self.state.checkpointed_step >= self.config.checkpoint_interval:
            self.checkpoint()

    def _decide(self) -> bool:
        """Decide and plan the next step. Returns False if nothing can run now."""
        decisions: list[ev.Scheduled | ev.Admitted | ev.Encoded] = []
        while (event := self._scheduler.schedule(self.view)) is not None:
            self._emit(event)
            if isinstance(event, (ev.Scheduled, ev.Admitted, ev.Encoded)):
                decisions.append(event)
        for stall in find_stalls(self.view):
            self._emit(stall)
            self.last_stall = (self.state.step, stall)
            if stall.kind == NO_PROGRESS:
                self.sink.commit()
                raise MMEngineError(f"no progress at step {self.state.step}: {stall.detail}")
        if decisions:
            self._is_decided = True
            needs_plan = self.executor.needs_plan
            self._plan = self._planner.plan(self.view, decisions) if needs_plan else NO_PLAN
            self._stats.num_scheduled_tokens += int(self._plan.num_scheduled.sum())
            if self._overlaps:
                self._stats.overlap[overlap.AHEAD if self._dispatched else self._waited_for] += 1
                self._waited_for = overlap.ALONE
                self._emit(ev.Dispatched())
        return bool(decisions)

    def _collect(self) -> None:
        sampled = self.state.sampled_rows()
        event = self._dispatched.collect(self.state, sampled)
        if isinstance(event, ev.Failed):
            self._emit(event)
            return
        one_each = event.counts is None and not event.errors and not self.state.leaving
        before = None if one_each else self.state.num_tokens[sampled]
        drafts = count_drafts(self.state, sampled, event)
        self._emit(event)
        taken = None if before is None else self.state.num_tokens[sampled] - before
        self._collector.outputs.tokens(self.view, sampled, taken, event, drafts)
        if self._dispatched.pooled:
            self._collector.outputs.vectors(self.view, self._dispatched.pooled)
        if drafts is not None:
            self._stats.drafts = add_drafts(self._stats.drafts, drafts)
        self._stats.num_output_tokens += len(sampled) if taken is None else int(taken.sum())

    def _commit_and_dispatch(self) -> Outputs:
        """Commit the log, then dispatch the decided step and return the outputs."""
        self._is_committed = self.sink.commit()
        if not self._is_committed:
            return Outputs()
        if self._store is not None:
            self._store.release()
        if self._is_decided:
            plan, self._is_decided, self._plan = self._plan, False, NO_PLAN
            self._dispatched.dispatch(plan)
        if self._snapshots is not None:
            self._snapshots.save_if_due()
        return self._collector.take()

    def tidy(self) -> None:
        """Write the pending snapshot, and do the log's postponed work. Any thread may call this
        method, but only one at a time.
        """
        if self._snapshots is not None:
            self._snapshots.flush()
        self.sink.tidy()

    def snapshot(self, sequence: int) -> bytes:
        """Return a snapshot of the state. `sequence`: the number of the log's last record."""
        return snapshot.take(self.state, self._started, sequence)

    def checkpoint(self) -> None:
        """Record the state's digest."""
        self._emit(checkpoint(self.state))

    def _emit(self, event: ev.Event) -> None:
        """Log the event, apply it to the state, and call the observers."""
        self._now = max(self._now, self._clock())  # `verify` checks that times do not decrease
        self.sink.append(event, self.state.step_of(event), self._now)
        for before in self._observers.before:
            before(event)
        evolve(self.state, event)
        for after in self._observers.after:
            after(event)
