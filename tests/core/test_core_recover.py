"""Tests recovery after a crash between any two records. Another process continues the log. Each request ends
once, with the tokens of an undisturbed run. `verify` accepts the whole log.
"""

import random

import pytest

from mmengine.core.engine import EngineCore
from mmengine.core.fold.evolve import evolve
from mmengine.core.state.state import State
from mmengine.errors import QueueFull
from mmengine.events import vocabulary as ev
from mmengine.events.log import LogWriter, MemoryLog
from mmengine.replay import verify
from mmengine.simulation.simulated_executor import SimulatedExecutor, reference_tokens
from tests.core.small_engine import image, request, settings_of
from tests.core.workloads import check_invariants, small_config, small_request

EOS_IN = 20


class Life:
    """Processes that continue a log, one after the other. `events`: the log."""

    def __init__(self, config, fault=lambda step: None):
        self.config, self.fault = config, fault
        self.events, self.core = [], None

    def begin(self, keep=None):
        """Start a process that continues the log after its first `keep` events (default: all)."""
        self.events = self.events[:keep]
        self.log = MemoryLog()
        executor = SimulatedExecutor(self.config, eos_in=EOS_IN, fault=self.fault, check_kv=True)
        if not self.events:
            self.core = EngineCore(self.config, executor, sink=self.log)
            return
        state = State(self.config)
        for event in self.events:
            evolve(state, event)
        self.core = EngineCore(self.config, executor, sink=self.log, state=state)
        self.core.recover(ev.Recovered())

    def step(self):
        self.core.step()
        check_invariants(self.core.state)

    def end(self):
        self.events += [record.event for record in self.log.records]


def answers(config, events):
    """Return ({request id: tokens}, {request id: finish reason}, the state after all events)."""
    state, tokens, ends = State(config), {}, {}
    for event in events:
        if isinstance(event, ev.Finished):
            req_state = state.requests.get(event.request_id)
            assert event.request_id not in ends, "ended once"
            ends[event.request_id] = event.reason
            if req_state is not None:
                row, prompt = req_state.row, req_state.num_prompt
                all_tokens = req_state.tokens if row < 0 else state.token_ids[row, : state.num_tokens[row]]
                tokens[event.request_id] = all_tokens[prompt:].tolist()
        evolve(state, event)
    return tokens, ends, state


def write_log(folder, config, events):
    writer, state = LogWriter(folder), State(config)
    for event in events:
        writer.append(event, state.step_of(event), 0)
        evolve(state, event)
    writer.close()


def check(config, requests, events, folder=None):
    tokens, ends, state = answers(config, events)
    assert set(ends) == {name for name, one in requests.items()} and not state.requests
    for name, one in requests.items():
        expected, reason = reference_tokens(one, config, eos_in=EOS_IN)
        if ends[name] in ("stop", "length"):
            assert (tokens[name], ends[name]) == (expected, reason)
        else:
            assert ends[name] in ("abort", "error", "rejected")
    if folder is not None:
        write_log(folder, config, events)
        report = verify(folder)
        assert report.ok and report.rederived and not report.unfinished, report.divergence


def undisturbed(config, requests):
    life = Life(config)
    life.begin()
    for one in requests.values():
        life.core.submit(one)
    while life.core.has_work:
        life.step()
    life.end()
    return life.events


@pytest.mark.long
@pytest.mark.parametrize("in_flight", [1, 2])
def test_a_crash_between_any_two_records(tmp_path, in_flight):
    config = settings_of(
        max_num_seqs=3,
        token_budget=12,
        num_blocks=11,
        max_model_len=40,
        max_in_flight=in_flight,
        swap_blocks=8,
    )
    requests = {
        one.request_id: one
        for one in (
            request("a", 9, max_tokens=6, media=[image(1, 2, 5)]),
            request("b", 14, max_tokens=9),
            request("c", 5, max_tokens=3, media=[image(1, 0, 4)]),
            request("d", 20, max_tokens=12),
        )
    }
    events = undisturbed(config, requests)
    assert any(isinstance(event, ev.Preempted) for event in events)
    seen = False
    for keep in range(1, len(events) + 1):
        life = Life(config)
        life.events = list(events)
        life.begin(keep)
        for name, one in requests.items():
            if not any(isinstance(e, ev.Queued) and e.request_id == name for e in events[:keep]):
                life.core.submit(one)
        while life.core.has_work:
            life.step()
        life.end()
        check(config, requests, life.events, tmp_path / str(keep) if keep % 5 == 0 else None)
        crashed = [e for e in life.events if isinstance(e, ev.Preempted) and e.reason == "crash"]
        assert all(event.mode == "recompute" for event in crashed)
        seen |= bool(crashed)
    assert seen


@pytest.mark.parametrize("seed", range(10))
def test_many_crashes_of_a_random_run(seed, tmp_path):
    check_crashes(seed, tmp_path)


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(1000, 2000))
def test_many_crashes_in_the_long_run(seed, tmp_path):
    check_crashes(seed, tmp_path)


def check_crashes(seed, tmp_path):
    rng = random.Random(seed)
    config = small_config(rng)
    if rng.random() < 0.5 and not config.compat:
        config = type(config)(**{**config.as_dict(), "max_in_flight": 2})
    life = Life(config, lambda step: "planted" if rng.random() < 0.04 else None)
    life.begin()
    requests, last = {}, None
    for number in range(16):
        last = small_request(rng, f"r{number}", config, like=last)
        try:
            life.core.submit(last)
        except QueueFull:
            pass
        else:
            requests[last.request_id] = last
        if rng.random() < 0.1:
            life.core.cancel(f"r{rng.randrange(number + 1)}")
        if rng.random() < 0.1:
            life.core.reset_prefix_cache(preempt_running=rng.random() < 0.5)
        for _ in range(rng.randrange(4)):
            life.step()
        if rng.random() < 0.3:
            before = len(life.events)
            life.end()
            life.begin(rng.randint(max(1, before), len(life.events)))
            queued = {e.request_id for e in life.events if isinstance(e, (ev.Queued, ev.Finished))}
            requests = {name: one for name, one in requests.items() if name in queued}
    while life.core.has_work:
        life.step()
    life.end()
    check(config, requests, life.events, tmp_path / "log")
