"""Runs a workload through EngineCore, one simulated step after another.

Before each step, the core asks its source for new events. The driver provides this source, and adds the
arrivals and other events that are due.
"""

from collections.abc import Callable
from dataclasses import dataclass

from mmengine.core.decide.deciders import scheduler_of
from mmengine.core.engine import EngineCore
from mmengine.core.inbox import Inbox
from mmengine.core.outputs import Stats
from mmengine.errors import InvalidRequest, LogError, MMEngineError
from mmengine.events import vocabulary as ev
from mmengine.events.log import MemoryLog
from mmengine.events.sink import Sink, SinkWrapper
from mmengine.simulation.fake_executor import FakeExecutor
from mmengine.simulation.meter import Meter
from mmengine.simulation.records import Recorder
from mmengine.simulation.sessions import SessionQueues, whole_request
from mmengine.simulation.settings import Settings
from mmengine.simulation.workload import SimEvent, SimRequest, Workload

NO_GRAMMAR = "the grammar does not compile"


@dataclass(slots=True)
class SimulationReport:
    """A run's result.

    `unfinished`: ids of requests that had not ended, or not even arrived, after the workload's `max_steps`.
    `num_refused`: number of requests that were refused as invalid. `refusal`: the error of the first refused
    request.
    """

    meter: Meter
    stats: Stats
    duration_ns: int
    num_steps: int
    unfinished: list[str]
    num_refused: int
    refusal: str


class _Feed:
    """The core's source of new events. `fill`: puts the due events into the inbox.

    `leavers`: returns the events of requests that end while the step runs.
    """

    def __init__(self, fill: Callable[[], None], leavers: Callable[[], list[ev.Event]]):
        self._fill, self.leavers = fill, leavers
        self.inbox: Inbox

    def drain(self) -> list[ev.Event]:
        self._fill()
        return self.inbox.drain()

    def __len__(self) -> int:
        return len(self.inbox)


class _Tap(SinkWrapper):
    """A sink that calls `see` for each event FINISHED or PREEMPTED that is appended to the log.

    Raises MMEngineError for an event FAILED: the fake model makes no step fail, so a retry would hide a bug.
    """

    def __init__(self, inner: Sink, see: Callable[[ev.Finished | ev.Preempted], None]):
        super().__init__(inner)
        self._see = see

    def append(self, event: ev.Event, step: int, mono_ns: int) -> None:
        super().append(event, step, mono_ns)
        if isinstance(event, (ev.Finished, ev.Preempted)):
            self._see(event)
        elif isinstance(event, ev.Failed):
            raise MMEngineError(f"the simulated step {step} failed: {event.error}")


class Driver:
    """Runs one simulation. `recorder`: receives the decisions. `log`: receives the events. `progress`: called
    from time to time with the number of requests that have ended.
    """

    def __init__(
        self,
        workload: Workload,
        settings: Settings,
        *,
        recorder: Recorder | None = None,
        log: Sink | None = None,
        progress: Callable[[int], None] = lambda ended: None,
    ):
        self._workload = workload
        self._recorder = recorder
        self._progress = progress
        self._meter = Meter(len(workload.requests), settings.config.max_num_seqs)
        self._pending = sorted(workload.requests, key=lambda each: each.arrival)
        self._next = 0  # index of the next arrival in `_pending`
        self._events = sorted(workload.events or (), key=lambda each: each.step)
        self._late: list[SimEvent] = []  # events that occur while the step runs
        self._sessions = SessionQueues()
        # With vLLM's scheduler, request id -> whether the scheduler has examined the request since its
        # grammar failed.
        self._failed: dict[str, bool] = {}
        self._step = 0
        self._num_steps = 0
        self._num_ended = self._num_refused = 0
        self._refusal = ""
        self._unfinished: list[str] = []
        observers = (self._meter,) if recorder is None else (self._meter, recorder)
        requests = {each.request_id: each for each in workload.requests}
        self._executor = FakeExecutor(settings.config, requests, settings.cost, observers)
        feed = _Feed(self._between_steps, self._leavers)
        self._core = EngineCore(
            settings.config.without_store(),
            self._executor,
            sink=_Tap(log or MemoryLog(limit=1), self._see),
            source=feed,
            fingerprints={"executor": "simulated"},
            clock=lambda: self._executor.clock_ns,
        )
        feed.inbox = self._core.inbox

    def run(self) -> SimulationReport:
        """Run the workload until all requests have ended. After the workload's `max_steps`, the remaining
        requests are cancelled. Raises LogError if the log cannot be written, and MMEngineError if the engine
        makes no progress.
        """
        core, state = self._core, self._core.state
        while self._next < len(self._pending) or self._events or core.has_work or self._sessions:
            tokens_before = self._meter.num_scheduled_tokens
            core.step()
            if core.stalled:
                raise LogError(core.stalled)
            if num_tokens := self._meter.num_scheduled_tokens - tokens_before:
                self._num_steps += 1
                self._meter.decided(state, num_tokens, self._executor.clock_ns)
            if self._recorder is not None:
                self._recorder.decided(state)
            if self._failed:
                examined = scheduler_of(core.config).admission.examined_in_step(core.view)
                self._failed |= dict.fromkeys(self._failed.keys() & examined, True)
            self._step += 1
            if self._step % 64 == 0:
                self._progress(self._num_ended)
        if self._recorder is not None:
            self._recorder.close()
        core.close()
        self._progress(self._num_ended)
        return SimulationReport(
            meter=self._meter,
            stats=core.stats(),
            duration_ns=self._executor.clock_ns,
            num_steps=self._num_steps,
            unfinished=self._unfinished,
            num_refused=self._num_refused,
            refusal=self._refusal,
        )

    # Calls from the core

    def _see(self, event: ev.Finished | ev.Preempted) -> None:
        if isinstance(event, ev.Preempted):
            self._meter.preempted()
            if self._recorder is not None:
                self._recorder.preempted(event.request_id)
            return
        self._num_ended += 1
        self._meter.finished(event.request_id, event.reason, self._executor.clock_ns)
        if self._recorder is not None:
            self._recorder.finished(event.request_id, event.reason)

    def _leavers(self) -> list[ev.Event]:
        leaving = [event for event in self._late if event.op == "abort"]
        self._late = [event for event in self._late if event.op != "abort"]
        return [*(ev.Cancelled(event.request_id, "cancelled") for event in leaving), *self._seen_failing()]

    def _between_steps(self) -> None:
        """Give the core the arrivals and events of the next step."""
        late, self._late = self._late, []
        now: list[SimEvent] = []
        over = self._step >= self._workload.max_steps
        while self._events and self._events[0].step <= self._step and not over:
            event = self._events.pop(0)
            (self._late if event.late else now).append(event)
        if self._recorder is not None:
            self._recorder.updated(self._core.state)
            aborted = {event.request_id for event in self._late if event.op == "abort"}
            self._recorder.begin(self._step, aborted)
        for failing in self._seen_failing():
            self._core.inbox.put(failing)
        self._happen(late)
        if over:
            self._give_up()
        elif self._workload.timed:
            self._arrive_until_now()
        else:
            self._arrive(self._step)
        for request in self._sessions.due(self._core):
            self._submit(request)
        self._happen(now)

    def _seen_failing(self) -> list[ev.Event]:
        """Return a GRAMMARFAILED event for each failed grammar that vLLM's scheduler has noticed.

        vLLM notices a failed grammar only when it examines the request.
        """
        names = [name for name, seen in self._failed.items() if seen]
        for name in names:
            del self._failed[name]
        return [ev.GrammarFailed(name, NO_GRAMMAR) for name in names]

    def _arrive_until_now(self) -> None:
        """Submit the requests that have arrived. If the engine has no work, first advance the clock to the
        next arrival.
        """
        if not self._core.state.requests and self._next < len(self._pending):
            self._executor.wait_until(self._pending[self._next].arrival)
        self._arrive(self._executor.clock_ns)

    def _arrive(self, until: int) -> None:
        while self._next < len(self._pending) and self._pending[self._next].arrival <= until:
            request = self._pending[self._next]
            self._next += 1
            if request.session:
                self._sessions.put(request)
            else:
                self._submit(request)

    def _submit(self, request: SimRequest) -> None:
        num_prompt = request.num_prompt
        try:
            if request.session:
                whole = whole_request(self._core, request)
                num_prompt = len(whole.prompt_token_ids)
                self._core.sessions.append(request.session, whole)
            else:
                self._core.submit(request.request())
        except InvalidRequest as error:
            self._refusal = self._refusal or f"{request.request_id}: {error}"
            self._num_refused += 1
            self._num_ended += 1
            return
        arrival = request.arrival if self._workload.timed else self._executor.clock_ns
        self._meter.arrived(request.request_id, num_prompt, arrival)
        if request.ranges and self._workload.events is None:
            self._core.inbox.put(ev.GrammarReady(request.request_id))

    def _happen(self, events: list[SimEvent]) -> None:
        core, leaving = self._core, set()
        for event in events:
            match event.op:
                case "abort":
                    leaving.add(event.request_id)
                    core.inbox.put(ev.Cancelled(event.request_id, "cancelled"))
                case "grammar_error" if core.config.compat:
                    self._failed[event.request_id] = False
                case "grammar_error":
                    leaving.add(event.request_id)
                    core.inbox.put(ev.GrammarFailed(event.request_id, NO_GRAMMAR))
                case "grammar_ready":
                    core.inbox.put(ev.GrammarReady(event.request_id))
                case "close_session" if event.request_id in core.state.sessions.all:
                    core.sessions.close(event.request_id, "closed")
                case "reset_prefix_cache":
                    if event.reset_running or not self._vllm_refuses_reset(leaving):
                        core.inbox.put(ev.CacheReset(event.reset_running))

    def _vllm_refuses_reset(self, leaving: set[str]) -> bool:
        """Return whether vLLM refuses a cache reset without preemption, because a request still has blocks.

        `leaving`: requests that end before the reset.
        """
        state = self._core.state
        names = {state.requests_by_row[row].request.request_id for row in state.running.tolist()}
        return state.config.compat != "" and bool(names - leaving)

    def _give_up(self) -> None:
        self._unfinished = list(self._core.state.requests)
        self._unfinished += [
            *self._sessions.left(),
            *(each.request_id for each in self._pending[self._next :]),
        ]
        self._next = len(self._pending)
        self._events.clear()
        for name in self._core.state.requests:
            self._core.cancel(name)
