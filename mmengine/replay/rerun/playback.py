"""Runs a script's requests in the engine's own loop, perhaps with other settings or fewer requests. The
answers stay unchanged.

    script ──► Playback (the source: due observations) ──► EngineCore ──► executor (answers, time)

An observation (an event from outside, such as a new request) is due at its step in the log, or at a time in
ns on the executor's clock. An idle engine waits for the next observation.
"""

from collections.abc import Callable
from typing import Protocol

from mmengine.config import EngineConfig
from mmengine.core.engine import EngineCore
from mmengine.core.executor import Executor
from mmengine.core.outputs import Outputs
from mmengine.events import vocabulary as ev
from mmengine.events.log import MemoryLog
from mmengine.events.sink import Sink, SinkWrapper
from mmengine.replay.rerun.script import Observation


class Clock(Protocol):
    """Determines when an `Observation` is due."""

    def due(self, observation: Observation) -> int: ...

    def now(self) -> int: ...

    def wait_until(self, due: int) -> None: ...


class ClockedExecutor(Executor, Protocol):
    """An executor with a clock in ns, for example a simulated executor."""

    @property
    def clock_ns(self) -> int: ...


class WaitingExecutor(ClockedExecutor, Protocol):
    """An executor whose clock can advance while idle."""

    def wait_until(self, time_ns: int) -> None: ...


class Timer:
    """A Clock in ns. When the executor's clock shows 0, the time in the log is `start_ns`."""

    def __init__(self, executor: WaitingExecutor, start_ns: int):
        self._executor, self._start_ns = executor, start_ns

    def due(self, observation: Observation) -> int:
        return observation.time_ns - self._start_ns

    def now(self) -> int:
        return self._executor.clock_ns

    def wait_until(self, due: int) -> None:
        self._executor.wait_until(due)


class Counter:
    """A Clock that counts each step twice: when the step is decided, and when its result has returned.
    `wait_until` advances the count permanently, so all later observations are due earlier.
    """

    def __init__(self, core: EngineCore):
        self._core, self._skipped = core, 0

    def due(self, observation: Observation) -> int:
        return observation.step + observation.landed

    def now(self) -> int:
        state = self._core.state
        return 2 * state.step - len(state.flights) + self._skipped

    def wait_until(self, due: int) -> None:
        self._skipped += max(0, due - self.now())


class _Heard(SinkWrapper):
    """A sink that passes each event to `see` before the event is applied. `moved`: whether an event was
    appended since the owner set `moved` to False.
    """

    def __init__(self, inner: Sink, see: Callable[[ev.Event], None]):
        super().__init__(inner)
        self._see, self.moved = see, False

    def append(self, event: ev.Event, step: int, mono_ns: int) -> None:
        self.moved = True
        super().append(event, step, mono_ns)
        self._see(event)


class Playback:
    """An engine that gets its observations from a script.

    With `timer`, observations are due at their time on the executor's clock, and this clock also measures
    deadlines. Without `timer`, the log's step numbers determine when observations are due and when deadlines
    pass. `see` gets each event before the event is applied. A playback has no block store, so this engine
    computes the blocks that the log's engine fetched.
    """

    def __init__(
        self,
        config: EngineConfig,
        observations: list[Observation],
        executor: ClockedExecutor,
        *,
        timer: Timer | None = None,
        sink: Sink | None = None,
        see: Callable[[ev.Event], None] = lambda event: None,
    ):
        self._observations, self._next = observations, 0
        self._timed = timer is not None
        self._heard = _Heard(sink or MemoryLog(limit=1), see)
        self.core = EngineCore(
            config.without_store(),
            executor,
            sink=self._heard,
            source=self,
            fingerprints={"executor": "playback"},
            clock=lambda: executor.clock_ns,
        )
        self._clock: Clock = timer or Counter(self.core)

    def step(self) -> Outputs | None:
        """Run the loop once and return the outputs, or None if nothing more can happen. Raises the engine's
        errors.
        """
        if not self.core.has_work:
            return None
        self._heard.moved = False
        self._crash()
        outputs = self.core.step()
        if self._heard.moved or outputs:
            return outputs
        if self._next == len(self._observations):
            return None  # The remaining requests wait for a grammar that the log lacks.
        self._clock.wait_until(self._clock.due(self._observations[self._next]))
        return outputs

    def _crash(self) -> None:
        """Repeat the log's crashes that are due. With a timer, skip all crashes."""
        while self._next < len(self._observations):
            event = self._observations[self._next].event
            due = self._clock.due(self._observations[self._next])
            if not isinstance(event, ev.Recovered) or due > self._clock.now() and not self._timed:
                return
            self._next += 1
            if not self._timed:
                self.core.executor.discard()
                lost = tuple((name, why) for name, why in event.lost if name in self.core.state.requests)
                self.core.recover(ev.Recovered(mode=event.mode, lost=lost))

    # Source

    def drain(self) -> list[ev.Event]:
        inbox, clock = self.core.inbox, self._clock
        events: list[ev.Event] = []
        if not self.core.state.requests and self._next < len(self._observations):
            clock.wait_until(clock.due(self._observations[self._next]))
        while self._next < len(self._observations):
            observation = self._observations[self._next]
            event = observation.event
            if clock.due(observation) > clock.now() or isinstance(event, ev.Recovered):
                break
            self._next += 1
            if not self._timed:
                events.append(event)
            elif not (isinstance(event, ev.Cancelled) and event.reason == ev.DEADLINE):
                inbox.put(event)
        return events + inbox.drain()

    def leavers(self) -> tuple[ev.Event, ...]:
        """Return nothing, because `drain` delivers all observations between steps."""
        return ()

    def __len__(self) -> int:
        return len(self._observations) - self._next
