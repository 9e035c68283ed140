"""A model cut over two processes on a CPU: the tokens of one process, and an end for whatever goes wrong."""

import itertools
import os
import select
import signal
import socket
import threading
import time
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from mmengine.config import EngineConfig
from mmengine.core.past import Resume
from mmengine.errors import ConfigError, ExecutorFailed, ExecutorLost, ModelError
from mmengine.events import vocabulary as ev
from mmengine.events.log import LogReader
from mmengine.models.sharding import COLUMNS, ROWS, Shard
from mmengine.replay import verify
from mmengine.runtime.parallel.channel import Channel, Closed, Kind
from mmengine.runtime.parallel.followers import Followers
from mmengine.runtime.parallel.group import GroupLost, StepGroup
from mmengine.runtime.parallel.ranks import device_of
from mmengine.serve.engine import Engine
from mmengine_qwen3_vl import plugin
from mmengine_qwen3_vl.config import read_config
from mmengine_qwen3_vl.loading import open_weights
from mmengine_qwen3_vl.sharding import PLAN, axis_of, check_plan
from mmengine_shapes import checkpoint_path
from tests.spec_decode.equality import answers, assert_same, mixed

# A pool so small that requests give way, and budgets that cut prompts and images.
TIGHT = {"block_size": 4, "num_blocks": 65, "token_budget": 96, "admission_reserve": "none"}


@pytest.fixture(scope="module")
def asked():
    return mixed(14, most_tokens=64)


@pytest.fixture(scope="module")
def wanted(asked):
    return answers(asked, spec="none")


def fail_once(executor):
    """Rank 0 breaks down in its ninth step, before it exchanges anything; no rank may be out of step then."""
    launch, count = executor._runner.launch, itertools.count()

    def launch_or_fail(*args):
        if next(count) == 8:
            raise ExecutorFailed("on purpose")
        return launch(*args)

    executor._runner.launch = launch_or_fail


@pytest.mark.parametrize(
    "settings",
    [{"swap_blocks": 64, "preempt_mode": "swap"}, {"max_in_flight": 2, "spec": "none"}],
    ids=["drafts and swap", "two in flight"],
)
def test_two_processes_give_the_tokens_of_one(asked, wanted, settings, tmp_path):
    found = answers(asked, log=tmp_path / "log", steer=fail_once, tensor_parallel=2, **TIGHT, **settings)
    assert_same(found, wanted)
    assert verify(tmp_path / "log").ok
    records = LogReader(tmp_path / "log")
    kinds = [type(record.event) for record in records]
    assert ev.Preempted in kinds, "nobody gave way"
    assert ev.Failed in kinds, "no step failed"


def test_a_rank_that_dies_ends_the_engine_and_the_log_goes_on(tmp_path):
    asked = {"request_id": "a", "max_tokens": 24, "ignore_eos": True}
    with Engine() as engine:
        whole = engine.generate(["Who are you?"], max_tokens=24, ignore_eos=True)[0].choices[0].token_ids
    with Engine(config=EngineConfig(tensor_parallel=2), log=tmp_path) as engine:
        engine.submit("Who are you?", **asked)
        engine.step()
        begin = time.monotonic()
        os.kill(engine.built.executor._followers._processes[0].pid, signal.SIGKILL)
        for _ in range(2):
            with pytest.raises(ExecutorLost, match="rank 1 of 2 was killed by signal 9; start"):
                while not engine.is_idle:
                    engine.step()
        assert time.monotonic() - begin < 20
        assert "rank 1 of 2" in engine.readiness().reasons[0]
    with Engine(config=EngineConfig(tensor_parallel=2), log=tmp_path, resume=Resume()) as engine:
        found = engine.requests.take_up("a")
        while not engine.is_idle:
            found = next((output.completion for output in engine.step() if output.completion), found)
    assert found.choices[0].token_ids == whole and verify(tmp_path).ok


@pytest.mark.parametrize("noticed_by", ["whoever is first", "its words", "the next step"])
def test_a_rank_that_loses_its_way_says_so(noticed_by):
    with Engine(config=EngineConfig(tensor_parallel=2)) as engine:
        engine.submit("Who are you?", max_tokens=24, ignore_eos=True)
        engine.step()
        followers = engine.built.executor._followers
        (channel,), (process,) = followers._channels, followers._processes
        send = channel.send

        def send_and_wait(*message):
            send(*message)
            if noticed_by == "its words":
                select.select([channel._end], [], [], 60)
            else:
                process.wait(60)
                send(*message)  # finds the channel closed, its words unread

        if noticed_by != "whoever is first":
            channel.send = send_and_wait
        engine.built.executor.frames.take = lambda: b"no frame"
        with pytest.raises(ExecutorLost, match="rank 1: .*cut short.*; .*start the engine again"):
            while not engine.is_idle:
                engine.step()


def test_a_rank_that_reads_nothing_is_not_waited_for():
    ours, theirs = socket.socketpair()
    with ours, theirs, pytest.raises(Closed):
        Channel(ours, 0.1).send(Kind.STEP, bytes(2**26))


def test_heads_that_cannot_be_shared_are_refused_with_the_arithmetic():
    with pytest.raises(ConfigError, match="cannot cut 2 KV heads: 2 = 3 x 0 . 2; choose 1, 2"):
        plugin.load_model(checkpoint_path(), device="cpu", dtype="float32", shard=Shard(0, 3, lambda x: x))


def test_gpus_that_are_not_there_are_refused():
    with pytest.raises(ConfigError, match="takes the first 2 GPUs"):
        device_of("cuda:1", 0, 2)
    if torch.cuda.device_count() < 2:
        with pytest.raises(ConfigError, match="needs 2 GPUs, and torch sees"):
            device_of("cuda", 0, 2)


def test_a_rank_that_cannot_start_says_why(tmp_path):
    followers = Followers(2, 60)
    try:
        followers.start(b"no job came before")
        with pytest.raises(ConfigError, match="rank 1 "):
            followers.await_ready(60)
    finally:
        followers.close()


# Weights


def test_ranks_read_parts_that_make_up_the_whole():
    config = read_config(checkpoint_path())
    device = torch.device("cpu")

    def shard(rank):
        return Shard(rank, 2, lambda x: x)

    with (
        open_weights(checkpoint_path(), config, device, torch.float32) as whole,
        open_weights(checkpoint_path(), config, device, torch.float32, shard(0)) as first,
        open_weights(checkpoint_path(), config, device, torch.float32, shard(1)) as second,
    ):
        for module, axis in PLAN.items():
            name = f"text.layers.1.{module}.weight"
            parts = first.read(name), second.read(name)
            assert parts[0].shape[axis] * 2 == whole.read(name).shape[axis]
            assert torch.equal(torch.cat(parts, axis), whole.read(name))
        for name in ("text.norm.weight", "text.embed_tokens.weight", "text.layers.0.self_attn.q_norm.weight"):
            assert torch.equal(first.read(name), whole.read(name))


def test_a_rank_holds_its_part_and_no_more():
    def part_of(rank, size):
        shard = Shard(rank, size, lambda x: x)
        return plugin.load_model(checkpoint_path(), device="cpu", dtype="float32", shard=shard)

    whole, part = part_of(0, 1), part_of(1, 2)
    assert (part.spec.num_heads, part.spec.num_kv_heads) == (2, 1)
    assert (whole.spec.num_heads, whole.spec.num_kv_heads) == (4, 2)
    assert part._vision is None and part._text._head is None


def test_biases_are_cut_with_outputs_and_added_once_behind_inputs():
    assert axis_of("text.layers.3.self_attn.q_proj.bias") == COLUMNS
    assert axis_of("text.layers.3.self_attn.o_proj.weight") == ROWS
    assert axis_of("text.layers.3.self_attn.o_proj.bias") is None
    assert axis_of("visual.blocks.0.mlp.linear_fc1.weight") is None
    assert axis_of("lm_head.weight") is None


def test_a_plan_that_names_nothing_is_no_plan():
    with pytest.raises(ModelError, match="hold no text.layers.0.self_attn.q_proj.weight to cut"):
        check_plan(read_config(checkpoint_path()).text, {"model.layers.0.q_proj.weight"})


# Exchanges within a step

SPEC = SimpleNamespace(num_layers=2, hidden_size=4, num_deepstack=1)
PLAN_OF_3 = SimpleNamespace(input_ids=np.zeros(3, np.int32), encode=())


def ranks_in_threads(tmp_path, *doings, size=2, may_wait=False):
    """Each of `doings` is called with the group of its rank, on a thread; gives what they gave or raised."""
    results = [None] * size

    def run(rank):
        group = StepGroup(rank, size)
        try:
            group.join(tmp_path / "store", torch.device("cpu"), 30.0)
            group.prepare(SPEC, torch.float32, torch.device("cpu"), may_wait=may_wait)
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
    said = []

    def failing(group):
        layers(group, fail_at=fail_at, report=said.append)
        return layers(group)

    def going_on(group):
        layers(group)
        return layers(group)

    first, second = ranks_in_threads(tmp_path, going_on, failing)
    assert torch.equal(first, second) and [str(error) for error in said] == ["on purpose"]


def test_rank_0_raises_what_failed_it_and_goes_on(tmp_path):
    def failing(group):
        with pytest.raises(ExecutorFailed, match="on purpose"):
            layers(group, fail_at=1)
        return layers(group)

    first, second = ranks_in_threads(tmp_path, failing, lambda group: [layers(group), layers(group)][1])
    assert torch.equal(first, second)


def test_what_no_rank_expects_is_not_exchanged(tmp_path):
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


def test_a_rank_that_is_gone_ends_the_wait(tmp_path):
    def leaving(group):
        group.close()

    found, _ = ranks_in_threads(tmp_path, layers, leaving)
    assert isinstance(found, GroupLost)
