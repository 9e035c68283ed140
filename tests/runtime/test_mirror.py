"""Tests that a Mirror, which reads only the log's encoded records (frames), derives the engine's plans."""

import random
from contextlib import suppress

import msgspec
import numpy as np
import pytest

from mmengine.core.engine import EngineCore
from mmengine.core.snapshot import snapshot
from mmengine.core.state.digest import state_digest
from mmengine.core.state.state import State
from mmengine.errors import Diverged, ExecutorFailed, QueueFull
from mmengine.events import vocabulary as ev
from mmengine.events.codec import NUMBERS, encode
from mmengine.events.log import MemoryLog
from mmengine.events.tee import Tee
from mmengine.runtime.parallel.mirror import Mirror
from mmengine.simulation.simulated_executor import SimulatedExecutor
from tests.core.small_engine import settings_of
from tests.core.workloads import small_config, small_request


class Mirrored(SimulatedExecutor):
    """Records each dispatched plan, and the plan that a Mirror derives from the log's frames."""

    needs_plan = True
    frames: Tee
    mirror: Mirror

    def dispatch(self, plan):
        # The plans are compared later, because an exception here would count as a failed step.
        self.plans = [
            *getattr(self, "plans", ()),
            (copied(plan), copied(self.mirror.fold(self.frames.take()))),
        ]
        super().dispatch(plan)


def copied(plan):
    return msgspec.structs.replace(plan, block_table=plan.block_table.copy())


def assert_same(one, other):
    for name in one.__struct_fields__:
        a, b = getattr(one, name), getattr(other, name)
        if isinstance(a, np.ndarray):
            assert a.dtype == b.dtype, name
            np.testing.assert_array_equal(a, b, name)
        elif name == "admitted":
            assert [x.row for x in a] == [x.row for x in b]
            for x, y in zip(a, b, strict=True):
                np.testing.assert_array_equal(x.token_ids, y.token_ids)
                assert x.request.request_id == y.request.request_id
        elif name == "encode":
            assert [(x.key, x.request.request_id, x.index) for x in a] == [
                (x.key, x.request.request_id, x.index) for x in b
            ]
        elif name == "fetched":
            assert [who for who, _ in a] == [who for who, _ in b]
            for (_, x), (_, y) in zip(a, b, strict=True):
                np.testing.assert_array_equal(x, y, name)
        elif name == "states" and a is not None:
            for field in a.__struct_fields__:
                np.testing.assert_array_equal(getattr(a, field), getattr(b, field), field)
        elif name == "part" and a is not None:
            assert (a.item.key, a.start, a.until, a.work) == (b.item.key, b.start, b.until, b.work)
        else:
            assert a == b, name


@pytest.mark.parametrize("seed", range(40))
def test_each_plan_follows_from_the_frames(seed):
    rng = random.Random(seed)
    config = small_config(rng)

    def fault(step):
        if rng.random() < 0.05:
            raise ExecutorFailed("on purpose")

    executor = Mirrored(config, eos_in=9, fault=fault)
    core = EngineCore(config, executor, sink=MemoryLog())
    executor.mirror = Mirror(snapshot.restore(core.snapshot(0))[0])
    executor.frames = core.sink = Tee(core.sink)
    for number in range(12):
        with suppress(QueueFull):
            core.submit(small_request(rng, f"r{number}", config))
        for _ in range(rng.randint(0, 3)):
            core.step()
        if rng.random() < 0.1:
            core.cancel(f"r{number}")
    while core.has_work:
        core.step()
    assert len(executor.plans) > 5
    for plans in executor.plans:
        assert_same(*plans)
    core.sink.commit()
    executor.mirror.fold(core.sink.take())
    assert state_digest(executor.mirror.state) == state_digest(core.state)


def test_a_diverged_state_is_detected_at_the_next_checkpoint():
    mirror = Mirror(State(settings_of()))
    frames = encode([(NUMBERS[ev.Checkpoint], 7, 0, ev.Checkpoint(b"0" * 16))], 3)
    with pytest.raises(Diverged, match="step 7"):
        mirror.fold(b"".join(frames))
