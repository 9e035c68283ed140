"""Derives a host's decisions again from a log's observations. The host is the engine that recorded the log,
such as vLLM. The derived engine has its own state, and a scheduler with the host's rules.
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
from mmengine.replay.hosted.engines import Ended, no_progress
from mmengine.replay.hosted.likely_rules import likely_rule
from mmengine.replay.hosted.outcome import DerivedOutcome, Difference, Outcome
from mmengine.replay.rules.observations import check_observation


class DerivedEngine:
    """An engine loop without an executor: the caller chooses when the engine schedules and when results
    return.

    Implements HostEngine (engines.py). `config`: the log's settings with the host's rules. `host`: the host's
    name, as in STARTED.
    """

    def __init__(self, config: EngineConfig, host: str):
        self.config, self.state = config, State(config)
        self.state.constants = constants_of(config, host)
        self.view = View(self.state)
        self.ends: deque[Ended] = deque()
        self._scheduler = scheduler_of(config)

    def observe(self, observation: ev.Event) -> None:
        """Apply an observation, such as an arrival or a cancellation. If requests end because of the
        observation, also apply their ends.
        """
        for event in accept(self.view, observation):
            evolve(self.state, event)
        self._end()

    @property
    def waiting(self) -> list[str]:
        return [req_state.request.request_id for req_state in self.state.waiting]

    @property
    def has_flights(self) -> bool:
        return bool(self.state.flights)

    def note(self, event: ev.Noted) -> bool:
        """Return whether this build's rules can derive the decisions after a NOTED event. This is only the
        case for the kind "stall", because a stall changes no decision.
        """
        return event.kind == "stall"

    def draft(self, event: ev.Drafted, names: list[str]) -> None:
        """Set these requests' drafts. Raises KeyError and ValueError as in HostEngine."""
        rows = np.array([self.state.requests[name].row for name in names], np.int32)
        observed = replace(event, rows=rows.tobytes())
        check_observation(self.state, observed)
        self.observe(observed)

    def schedule(self) -> Outcome:
        """Run a scheduling call, and return its outcome. The step stays open, even if it has no rows."""
        collected = DerivedOutcome(self.state)
        while (event := self._scheduler.schedule(self.view)) is not None:
            collected.note(event)
            evolve(self.state, event)
        return collected.outcome()

    def dispatch(self) -> None:
        """Close the open step, whose result returns later."""
        evolve(self.state, ev.Dispatched())

    def collect(self, result: ev.Executed | ev.Failed) -> None:
        """Apply the oldest step's result, and the ends of requests that follow from it. Raises ValueError for
        a result that does not match the step.
        """
        check_observation(self.state, result)
        evolve(self.state, result)
        self._end()

    def drop_empty_step(self) -> None:
        """Close an open step without rows, which has no result."""
        if self.state.is_open and not len(self.state.step_rows) and not self.state.flights:
            evolve(self.state, ev.Executed(b""))

    def left_over(self) -> list[str]:
        """Return the requests that the next call to `schedule` would include. Returns [] while a step is in
        flight.
        """
        if self.state.flights:
            return []
        self.drop_empty_step()
        return [] if self.state.is_open else [name for name, _ in self.schedule().rows]

    def stalled(self) -> str:
        """Return the `no_progress` message or "", as in HostEngine."""
        state, free = self.state, self.state.blocks.num_free
        could_run = any(not req_state.waits_for_grammar for req_state in state.requests.values())
        if state.flights or state.is_open or not free or not could_run:
            return ""
        return no_progress(len(state.running), len(state.waiting), free, self.config.num_blocks)

    def rule_of(self, found: Difference, logged: Outcome, derived: Outcome, waiting: list[str]) -> str:
        """Return the rule of vLLM that most likely explains a difference, as a sentence."""
        return likely_rule(found, logged, derived, self.view, waiting)

    def _end(self) -> None:
        for end in complete(self.view):
            evolve(self.state, end)
            self.ends.append(end)
