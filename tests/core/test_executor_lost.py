"""Tests that a lost executor stops the engine and ends no request."""

import pytest

from mmengine.errors import ExecutorLost
from mmengine.events import vocabulary as ev
from mmengine.events.log import MemoryLog
from mmengine.events.tee import Tee
from mmengine.simulation.simulated_executor import SimulatedExecutor
from tests.core.small_engine import Bench, request, settings_of


class Gone(SimulatedExecutor):
    """Raises ExecutorLost at the third step and all later steps."""

    steps = 0

    def dispatch(self, plan):
        Gone.steps += 1
        if Gone.steps > 2:
            raise ExecutorLost("the device is gone")
        super().dispatch(plan)


@pytest.mark.parametrize("max_in_flight", [1, 2])
def test_every_step_raises_and_no_request_fails(max_in_flight):
    Gone.steps = 0
    config = settings_of(max_in_flight=max_in_flight)
    bench = Bench(executor=Gone(config, eos_in=0), max_in_flight=max_in_flight)
    bench.submit(request("a", 5, max_tokens=8))
    for _ in range(3):
        with pytest.raises(ExecutorLost, match="the device is gone"):
            bench.run()
    assert not bench.ends and "a" in bench.state.requests
    assert not [record for record in bench.log.records if isinstance(record.event, (ev.Failed, ev.Finished))]
    bench.core.recover(ev.Recovered())  # as the next process does
    bench.executor.discard()
    Gone.steps = -100
    bench.run()
    assert bench.ends["a"] == ("length", "") and len(bench.tokens["a"]) == 8


class Full(MemoryLog):
    """A log whose commits fail while `full` is set."""

    full = True

    def commit(self):
        return not self.full


def test_no_step_is_dispatched_before_its_record_is_written():
    """A Tee's bytes, which the other ranks need for a step, exist only after the commit."""
    tee = Tee(Full())
    tee.append(ev.Dispatched(), 3, 17)
    assert not tee.commit() and tee.take() == b""
    tee.inner.full = False
    assert tee.commit() and tee.take() and tee.take() == b""
