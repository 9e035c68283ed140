"""Compares preemptions and admissions with a simple model while two steps are in flight. No request may be
preempted while a step runs.
"""

import random
from dataclasses import dataclass, field, replace

import pytest
from workloads import small_config, small_request

from mmengine.config import EngineConfig
from mmengine.core.engine import EngineCore
from mmengine.events import vocabulary as ev
from mmengine.simulation.simulated_executor import SimulatedExecutor

SEEDS = range(40)


@dataclass
class Follower:
    """A model of the rules in docs/explanation/policies.md. `see` checks an event and updates the model."""

    config: EngineConfig
    arrivals: dict = field(default_factory=dict)  # request id -> (QUEUED, number in order of arrival)
    running: list = field(default_factory=list)
    waiting: list = field(default_factory=list)
    rows: dict = field(default_factory=dict)
    in_flight: int = 0
    gave_way: bool = False  # whether a request was preempted since the last dispatch
    preemptions: int = 0

    def rank(self, name):
        event, number = self.arrivals[name]
        return (event.priority, number) if self.config.policy == "priority" else (number,)

    def passed_over(self, name, grammars):
        """Return whether later requests may overtake the request `name`, because this request may wait for a
        grammar, an adapter, an encoder output, or its group's prompt.
        """
        event = self.arrivals[name][0]
        return name in grammars or bool(event.media or event.group or event.adapter)

    def see(self, event, grammars):
        match event:
            case ev.Queued():
                self.arrivals[event.request_id] = (event, len(self.arrivals))
                self.waiting = sorted([*self.waiting, event.request_id], key=self.rank)
            case ev.Preempted():
                by_policy = max(self.running, key=self.rank)
                victim = by_policy if self.config.policy == "priority" else self.running[-1]
                assert event.request_id == victim
                assert not self.in_flight, "its blocks would not be free"
                self.running.remove(victim)
                self.waiting = sorted([*self.waiting, victim], key=self.rank)
                self.gave_way, self.preemptions = True, self.preemptions + 1
            case ev.Admitted():
                before = self.waiting[: self.waiting.index(event.request_id)]
                assert all(self.passed_over(name, grammars) for name in before)
                assert not (self.gave_way and self.running)
                self.waiting.remove(event.request_id)
                self.running.append(event.request_id)
                self.rows[event.request_id] = event.row
            case ev.Finished():
                self.running = [name for name in self.running if name != event.request_id]
                self.waiting = [name for name in self.waiting if name != event.request_id]
            case ev.Dispatched():
                self.in_flight, self.gave_way = self.in_flight + 1, False
            case ev.Executed():
                self.in_flight -= 1


def follow(seed):
    rng = random.Random(seed)
    config = small_config(rng)
    while config.max_in_flight < 2 or config.swap_blocks:
        config = small_config(rng)
    core = EngineCore(config, SimulatedExecutor(config, eos_in=3))
    follower, grammars, seen, last = Follower(config), {}, 0, None
    for step in range(600):
        if step < 20 and rng.random() < 0.7 and len(core.state.waiting) < config.max_waiting:
            request = small_request(rng, f"r{step}", config, grammars=0.2, like=last)
            request = replace(request, tenant="")  # a Follower does not know tenants
            last = request if not request.group else last
            core.submit(request)
            if request.grammar is not None:
                grammars[request.request_id] = step + rng.randint(0, 6)
        for name in [name for name, at in grammars.items() if at <= step]:
            core.grammar_ready(name)
        core.step()
        records = list(core.sink.records)
        for record in records[seen:]:
            if isinstance(record.event, ev.GrammarReady):
                grammars.pop(record.event.request_id, None)
            follower.see(record.event, grammars)
        seen = len(records)
        assert [
            core.state.requests_by_row[row].request.request_id for row in core.state.running
        ] == follower.running
        assert [req_state.request.request_id for req_state in core.state.waiting] == follower.waiting
        if step >= 20 and not core.has_work:
            break
    assert not core.state.requests
    return follower.preemptions


@pytest.mark.long
def test_the_policy_holds_with_two_steps_in_flight():
    assert sum(follow(seed) for seed in SEEDS) > len(SEEDS), "there were preemptions, so blocks were short"


@pytest.mark.soak
def test_the_policy_holds_with_two_steps_in_flight_at_length():
    for seed in range(1000, 3000):
        follow(seed)
