"""Tests the exchanges between tensor-parallel ranks in a step, with and without a captured graph.

The ranks are threads. A few all-reduces replace the model's layers.
"""

import threading
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from repeater import Warming

from mmengine.errors import ExecutorFailed, ExecutorLost
from mmengine.runtime.attention.base import Bucket
from mmengine.runtime.device.cpu import CpuDevice
from mmengine.runtime.executor import ON_CPU
from mmengine.runtime.graphs import capture
from mmengine.runtime.graphs.buckets import Frame
from mmengine.runtime.parallel.graphs import SharedCapture
from mmengine.runtime.parallel.group import GroupLost, StepGroup
from mmengine.runtime.parallel.leader import LeadingExecutor

SPEC = SimpleNamespace(num_layers=2, hidden_size=4, num_deepstack=1)
PLAN_OF_3 = SimpleNamespace(input_ids=np.zeros(3, np.int32), encode=())


def ranks_in_threads(tmp_path, *doings, size=2, may_wait=False):
    """Call doings[rank] with the rank's StepGroup, each in a thread. Returns their results or exceptions."""
    results = [None] * size

    def run(rank):
        group = StepGroup(rank, size)
        try:
            group.join(tmp_path / "store", CpuDevice(), 30.0)
            group.prepare(SPEC, ON_CPU, may_wait=may_wait)
            results[rank] = doings[rank](group)
        except Exception as error:
            results[rank] = error

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    return results


def layers(group, plan=PLAN_OF_3, fail_at=None, **report):
    x = torch.full((3, 4), float(group.rank + 1))
    with group.step(plan, **report):
        for at in range(4):
            if at == fail_at:
                raise ExecutorFailed("on purpose")
            x = group.all_reduce(x)
    return x


def test_all_ranks_have_the_same_sum(tmp_path):
    first, second = ranks_in_threads(tmp_path, layers, layers)
    assert torch.equal(first, second) and first[0, 0] == 3 * 2**3


@pytest.mark.parametrize("fail_at", range(4))
def test_a_rank_that_fails_leaves_the_others_in_step(tmp_path, fail_at):
    # The failing rank still takes part in the step's exchanges, so the next step works on both ranks.
    said = []

    def failing(group):
        layers(group, fail_at=fail_at, report=said.append)
        return layers(group)

    def going_on(group):
        layers(group)
        return layers(group)

    first, second = ranks_in_threads(tmp_path, going_on, failing)
    assert torch.equal(first, second) and [str(error) for error in said] == ["on purpose"]


def test_rank_0_raises_its_failure_and_continues(tmp_path):
    def failing(group):
        with pytest.raises(ExecutorFailed, match="on purpose"):
            layers(group, fail_at=1)
        return layers(group)

    first, second = ranks_in_threads(tmp_path, failing, lambda group: [layers(group), layers(group)][1])
    assert torch.equal(first, second)


def test_unexpected_exchanges_are_refused(tmp_path):
    def wrong(group):
        with group.step(PLAN_OF_3):
            group.all_reduce(torch.zeros(2, 4))

    found, _ = ranks_in_threads(tmp_path, wrong, layers)
    assert "wants to exchange" in str(found)


def test_features_and_tokens_come_from_rank_0(tmp_path):
    item = SimpleNamespace(request=SimpleNamespace(media=[SimpleNamespace(num_embeds=5)]), index=0)
    plan = SimpleNamespace(input_ids=np.zeros(3, np.int32), encode=(item,))

    def both(group):
        with group.step(plan):
            features = group.features(torch.full((5, 8), float(group.rank)))
            ids = group.token_ids(torch.full((3,), group.rank, dtype=torch.int64))
            for _ in range(4):
                group.all_reduce(torch.zeros(3, 4))
        return int(features.sum()), int(ids.sum())

    assert ranks_in_threads(tmp_path, both, both, may_wait=True) == [(0, 0), (0, 0)]


def test_exchanges_between_gpus_stay_on_the_stream_of_the_layers():
    """Exchanges must be synchronous calls. An asynchronous call would return a work object to wait for."""
    calls = []

    def exchange(tensors, options):
        calls.append((tensors[0].shape, options.asyncOp))

    group = StepGroup(0, 2)
    group._group = SimpleNamespace(allreduce=exchange, broadcast=exchange)
    group.prepare(SPEC, ON_CPU, may_wait=True)
    with group.step(PLAN_OF_3):
        group.token_ids(torch.zeros(3, dtype=torch.int64))
    assert calls == [((3,), False), *[((3, 4), False)] * 4]


# Steps that are captured

FOUR = Bucket(4, 1)


def compute(group, fail_at=None):
    x = torch.full((4, 4), float(group.rank + 1))
    for at in range(4):
        if at == fail_at:
            raise ExecutorFailed("on purpose")
        x = group.all_reduce(x)
    group.sums = x.clone()


class Captured:
    """Replaces a group's DecodeGraphs. Every step is replayed as the captured step with four rows (FOUR)."""

    def __init__(self, group, begin=lambda: None):
        self.replay, self._begin = partial(group.replay, FOUR, partial(compute, group)), begin

    def find(self, plan):
        return Frame(FOUR, slice(0, 3))

    def run_empty(self, bucket):
        assert bucket == FOUR
        self._begin()
        self.replay()


def replayed(group, fail=None, **report):
    """Run a replayed step. With `fail` the step raises before ("before") or after ("behind") the replay."""
    group.graphs = group.graphs or Captured(group)
    with group.step(PLAN_OF_3, **report):
        if fail == "before":
            raise ExecutorFailed("on purpose")
        group.graphs.replay()
        if fail == "behind":
            raise ExecutorFailed("on purpose")
    return group.sums


@pytest.mark.parametrize("fail", ["before", "behind"])
def test_a_rank_that_fails_replays_the_step_all_the_same(tmp_path, fail):
    said = []

    def failing(group):
        replayed(group, fail, report=said.append)
        return replayed(group), layers_of_4(group)

    def going_on(group):
        replayed(group)
        return replayed(group), layers_of_4(group)

    def layers_of_4(group):  # the next step, which runs without a graph
        group.graphs = None
        return layers(group)

    first, second = ranks_in_threads(tmp_path, going_on, failing)
    assert all(torch.equal(one, other) for one, other in zip(first, second, strict=True))
    assert [str(error) for error in said] == ["on purpose"]


def test_a_rank_that_can_replay_nothing_is_lost(tmp_path):
    """A rank whose step fails replays the step's graph without rows. If this fails, too, all ranks lose the
    group, because the other ranks wait in their replays.
    """

    def failing(group):
        def begin():
            raise RuntimeError("no memory")

        group.graphs = Captured(group, begin)
        try:
            replayed(group, "before", report=lambda error: None)
        finally:
            assert group.lost
            group.close()

    first, second = ranks_in_threads(tmp_path, replayed, failing)
    assert isinstance(first, GroupLost) and isinstance(second, GroupLost)
    assert "could not replay a step: no memory" in str(second)


def test_a_replay_that_no_rank_expects_is_refused(tmp_path):
    def wrong(group):
        with group.step(PLAN_OF_3):
            Captured(group).replay()

    found, _ = ranks_in_threads(tmp_path, wrong, layers)
    assert "wants to replay" in str(found)


@pytest.mark.parametrize("where", ["begin", (0, 0), (1, 3), (2, 1), "end", "other sizes", "nowhere"])
def test_steps_are_captured_by_all_ranks_or_by_none(tmp_path, monkeypatch, where):
    """Rank 1 fails while capturing its second bucket: before the first pass, in a pass, or at the end.

    Both ranks then run the next step without a graph.
    """
    monkeypatch.setattr(capture.log, "warning", lambda what, **facts: None)
    words, meeting = {}, threading.Barrier(2, timeout=30)

    def agree(rank, word):
        words[rank] = word
        meeting.wait()
        agreed = word != "" and len(set(words.values())) == 1
        meeting.wait()
        return agreed

    def doing(group):
        passes = iter(range(6))  # numbers of the second bucket's passes, at most three

        def prepare(bucket):
            if where == "begin" and group.rank and bucket == Bucket(2, 1):
                raise RuntimeError("no memory")

        def one(bucket):
            fails = isinstance(where, tuple) and group.rank and bucket == Bucket(2, 1)
            number, at = (next(passes), where) if fails else (0, (None, None))
            x = torch.ones(bucket.num_tokens, 4)
            for exchange in range(4):
                if fails and (number, exchange) == at:
                    raise RuntimeError("on purpose")
                group.all_reduce(x)

        sizes = [FOUR, Bucket(2, 1)]
        sizes = sizes[::-1] if where == "other sizes" and group.rank else sizes
        recorder = Warming(2 if where == "end" and group.rank else None)
        found = SharedCapture(group, partial(agree, group.rank))("steps", sizes, prepare, one, recorder)
        return list(found), layers(group)

    (first, sums), (second, other_sums) = ranks_in_threads(tmp_path, doing, doing)
    assert first == second == ([FOUR, Bucket(2, 1)] if where == "nowhere" else [])
    assert torch.equal(sums, other_sums)


def test_a_step_that_waits_on_the_device_looks_at_the_others():
    """Rank 0 checks the other ranks during the wait. Without the check, a graph that waits for a dead rank
    would wait for ever without an error.
    """

    def check():
        seen.append(1)
        if len(seen) == 2:
            raise ExecutorLost("rank 1 is gone")

    seen, waiting = [], object.__new__(LeadingExecutor)
    waiting._followers, waiting._group = SimpleNamespace(check=check), StepGroup(0, 2)
    waiting._group.timeout_s = 60.0
    with pytest.raises(ExecutorLost, match="rank 1 is gone"):
        waiting._await(SimpleNamespace(query=lambda: False))
    waiting._group.timeout_s = 0.0
    with pytest.raises(GroupLost, match="more than 0 seconds"):
        waiting._await(SimpleNamespace(query=lambda: False))
    waiting._await(SimpleNamespace(query=lambda: True))


def test_a_rank_that_is_gone_ends_the_wait(tmp_path):
    def leaving(group):
        group.close()

    found, _ = ranks_in_threads(tmp_path, layers, leaving)
    assert isinstance(found, GroupLost)
