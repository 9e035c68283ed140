"""Everything that can go wrong at once, seeded: failed steps and rows, results that do not fit,
interrupts, a log that stalls, cancels, deadlines, ids that come again."""

import random
from dataclasses import replace

import pytest

from mmengine.core.engine import EngineCore
from mmengine.core.evolve import evolve
from mmengine.core.simulate import SimulatedExecutor, reference_tokens
from mmengine.core.state import State
from mmengine.errors import MMEngineError, QueueFull
from mmengine.events.log import LogReader, LogWriter
from mmengine.replay import request_lines, step_lines, verify
from tests.core.workloads import check_invariants, small_config, small_request

EOS_IN = 20


class Unreliable(SimulatedExecutor):
    def __init__(self, rng, config):
        super().__init__(config, eos_in=EOS_IN, fault=self._fails, check_kv=True)
        self.rng = rng

    def _fails(self, step):
        return "planted" if self.rng.random() < 0.05 else None

    def _upset(self, chance):
        if self.rng.random() < chance:
            raise self.rng.choice([KeyboardInterrupt, KeyboardInterrupt, ValueError, MemoryError])

    def dispatch(self, plan):
        self._upset(0.03)
        super().dispatch(plan)

    def collect(self):
        self._upset(0.03)
        result = super().collect()
        if len(result.token_ids) and self.rng.random() < 0.03:
            return replace(result, token_ids=result.token_ids[:-1])
        if len(result.token_ids) and self.rng.random() < 0.03:
            rows = len(result.token_ids) if result.counts is None else len(result.counts)
            broken = self.rng.randrange(rows)
            stops = tuple((index, kind) for index, kind in result.stops if index != broken)
            return replace(result, stops=stops, errors=((broken, "NaN"),))
        return result


class Stalling(LogWriter):
    """Takes a commit in so many tries."""

    planted = False

    def __init__(self, rng, folder):
        self.rng = rng
        super().__init__(folder, segment_bytes=5000)

    def commit(self):
        self.planted = self.rng.random() < 0.1
        return not self.planted and super().commit()

    @property
    def stalled(self):
        return "planted" if self.planted else super().stalled


class Chaos:
    def __init__(self, seed, folder):
        self.rng, self.folder, self.now = random.Random(seed), folder, 0
        self.config = small_config(self.rng)
        executor = Unreliable(self.rng, self.config)
        self.sink = Stalling(self.rng, folder)
        self.core = EngineCore(self.config, executor, sink=self.sink, clock=self._clock)
        self.live, self.ended = {}, []

    def _clock(self):
        self.now += 1
        return self.now

    def arrive(self, number):
        request = small_request(self.rng, f"r{self.rng.randrange(8)}", self.config)
        if request.request_id in self.live:
            return
        if self.rng.random() < 0.2:
            object.__setattr__(request, "deadline_ns", self.rng.randrange(1, 200))
        try:
            self.core.submit(request)
        except QueueFull:
            return
        except MMEngineError:
            assert self.core.stalled
            return
        self.live[request.request_id] = (request, [])

    def step(self):
        try:
            outputs = self.core.step()
        except KeyboardInterrupt:
            return
        for output in outputs:
            request, tokens = self.live[output.request_id]
            tokens += output.token_ids
            if output.finish_reason is not None:
                self.ended.append((request, tokens, output.finish_reason))
                del self.live[output.request_id]
                self.core.delivered(output.request_id)
        check_invariants(self.core.state)

    def run(self):
        for number in range(40):
            self.arrive(number)
            if self.rng.random() < 0.1:
                self.core.cancel(f"r{self.rng.randrange(8)}")
            for _ in range(self.rng.randrange(5)):
                self.step()
        while self.core.has_work:
            self.step()
        self.sink.rng = random.Random(0)
        self.sink.commit = lambda: LogWriter.commit(self.sink)
        self.sink.planted = False
        self.core.close()


@pytest.mark.parametrize("seed", range(50))
def test_nothing_is_lost(seed, tmp_path):
    check_chaos(seed, tmp_path)


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(1000, 2000))
def test_nothing_is_lost_in_the_long_run(seed, tmp_path):
    check_chaos(seed, tmp_path)


def check_chaos(seed, tmp_path):
    chaos = Chaos(seed, tmp_path / "log")
    chaos.run()
    assert not chaos.live and chaos.ended
    for request, got, reason in chaos.ended:
        tokens, end = reference_tokens(request, chaos.config, eos_in=EOS_IN)
        if reason in ("stop", "length"):
            assert (got, reason) == (tokens, end)
        else:
            assert got == tokens[: len(got)]
    state = State(chaos.config)
    for record in LogReader(chaos.folder):
        evolve(state, record.event)
    assert state.digest() == chaos.core.state.digest()
    report = verify(chaos.folder)
    assert report.ok and not report.unfinished, report.divergence
    known = [line.finish_reason for line in request_lines(chaos.folder)]
    assert sorted(known) == sorted(reason for _, _, reason in chaos.ended if reason != "rejected")
    assert len(list(step_lines(chaos.folder))) == chaos.core.state.step
