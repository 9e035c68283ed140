"""Derives a host's decisions: a state and a scheduler with the host's rules, fed with a recorded log's
observations.
"""

from collections import deque

import numpy as np
from msgspec.structs import replace

from mmengine.config import EngineConfig
from mmengine.core.decide.completion import complete
from mmengine.core.decide.deciders import scheduler_of
from mmengine.core.decide.request_checks import accept
from mmengine.core.first_events import constants_of
from mmengine.core.fold.evolve import evolve
from mmengine.core.state.state import State
from mmengine.core.state.view import View
from mmengine.events import vocabulary as ev
from mmengine.replay.hosted.outcome import DerivedOutcome, Outcome

Ended = ev.Finished | ev.Preempted


class DerivedEngine:
    """An engine's loop without an executor, whose caller chooses when it schedules and when results return.

    `config`: the log's settings with the host's rules. `host`: as in STARTED. `ends`: the decisions
    that the last observations or results led to, oldest first, which the log must contain next.
    """

    def __init__(self, config: EngineConfig, host: str):
        self.state = State(config)
        fills = config.max_in_flight > 1 or (config.num_draft_tokens > 0 and config.compat != "vllm-0.32")
        self.state.constants = replace(constants_of(config, host), fills_with_results=fills)
        self.view = View(self.state)
        self.ends: deque[Ended] = deque()
        self._scheduler = scheduler_of(config)

    def observe(self, observation: ev.Event) -> None:
        """Apply an arrival, a cancellation or another observation, and the ends that follow from it."""
        for event in accept(self.view, observation):
            evolve(self.state, event)
        self._end()

    def rows_of(self, names: list[str]) -> bytes:
        """Return the rows of these requests, int32. Raises KeyError for a request that has ended."""
        return np.array([self.state.requests[name].row for name in names], np.int32).tobytes()

    def schedule(self) -> Outcome:
        """Decide one call and return its outcome. The step stays open, with or without rows."""
        collected = DerivedOutcome(self.state)
        while (event := self._scheduler.schedule(self.view)) is not None:
            collected.note(event)
            evolve(self.state, event)
        return collected.outcome()

    def dispatch(self) -> None:
        """Close the open step. Its result returns later, and the next call may come before."""
        evolve(self.state, ev.Dispatched())

    def collect(self, result: ev.Executed | ev.Failed) -> None:
        """Apply the result of the oldest step, and the ends that follow from it."""
        evolve(self.state, result)
        self._end()

    def drop_empty_step(self) -> None:
        """Close an open step without rows, which has no result."""
        if self.state.is_open and not len(self.state.step_rows) and not self.state.flights:
            evolve(self.state, ev.Executed(b""))

    def _end(self) -> None:
        for end in complete(self.view):
            evolve(self.state, end)
            self.ends.append(end)
