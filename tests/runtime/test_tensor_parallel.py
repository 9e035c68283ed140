"""Tests tensor parallelism over two CPU processes: tokens equal a single process's, and a rank's failures are
reported.
"""

import os
import select
import signal
import socket

import pytest
import torch
from repeater import FAILS, FOLLOWER, Warming, fail_at, let_backends_capture

from mmengine.config import EngineConfig
from mmengine.core.resume import Resume
from mmengine.errors import ConfigError, ExecutorFailed, ExecutorLost, ModelError
from mmengine.events import vocabulary as ev
from mmengine.events.log import LogReader
from mmengine.gpu.vision_ops import VisionOps, attend_by_frames, rotate
from mmengine.models.decoder.sharding import ATTENTION, SWIGLU, axis_of, check_plan
from mmengine.models.sharding import COLUMNS, ROWS, Shard
from mmengine.models.vision import tower
from mmengine.models.weights import open_weights
from mmengine.replay import verify
from mmengine.runtime.device.cuda import CudaDevice
from mmengine.runtime.graphs import capture
from mmengine.runtime.parallel import followers, leader
from mmengine.runtime.parallel.channel import Channel, ChannelClosed, MessageKind
from mmengine.runtime.parallel.followers import Followers
from mmengine.serve.engine.engine import Engine
from mmengine_qwen3_vl import plugin
from mmengine_qwen3_vl.config import read_config
from mmengine_qwen3_vl.names import NAMES
from mmengine_shapes import checkpoint_path
from tests.spec_decode.equality import answers, assert_same, mixed

# The pool is so small that requests are preempted, and with these budgets, prompts and images need several
# steps.
TIGHT = {
    "block_size": 4,
    "num_blocks": 65,
    "token_budget": 96,
    "admission_reserve": "none",
    "max_retries": 2,
    "encoder_budget": 128,
    "max_item_embeds": 128,
}


@pytest.fixture(scope="module")
def asked():
    return mixed(14, most_tokens=64)


@pytest.fixture(scope="module")
def wanted(asked):
    return answers(asked, spec="none")


def fail_once(executor):
    """Let rank 0 fail in its ninth step, before any exchange. The ranks must stay synchronized."""
    executor._runner.launch = fail_at(9, executor._runner.launch)


@pytest.fixture
def captured(monkeypatch):
    """Return a function that turns on graph capture for two ranks and returns rank 0's recorder.

    Arguments: the number of the capture and the number of the step that fail on rank 1 (0: none).
    """

    def begin(capture=0, step=0):
        recorder = Warming()
        let_backends_capture(monkeypatch.setattr)
        monkeypatch.setattr(leader, "recorder_for", lambda config, device: recorder)
        monkeypatch.setattr(followers, "_COMMAND", FOLLOWER)
        monkeypatch.setenv(FAILS, f"{capture} {step}")
        return recorder

    return begin


SWAP = {"swap_blocks": 64, "preempt_mode": "swap"}
AHEAD = {"max_in_flight": 2}  # The default `spec` drafts forced tokens of grammars.
PIECES = {"encoder_piece": 40, "encoder_even_patches": 256}  # rank 0 encodes images in parts


@pytest.mark.parametrize(
    "settings, replays",
    [(SWAP, True), (AHEAD | PIECES, False), pytest.param(AHEAD, True, marks=pytest.mark.soak)],
    ids=["drafts and swap, replayed", "two in flight, in pieces", "two in flight, replayed"],
)
def test_two_processes_give_the_tokens_of_one(
    asked, wanted, captured, settings, replays, tmp_path, monkeypatch
):
    """A step fails on rank 0 and, with replays, another step fails on rank 1. In each failed step, the other
    rank still runs.

    Images are encoded on rank 0, where encoder calls are replayed too.
    """
    recorder, seen = captured(step=30) if replays else None, []
    monkeypatch.setattr(tower, "vision_ops", lambda *of: VisionOps(rotate, attend_by_frames))

    def steer(executor):
        fail_once(executor)
        seen.append(executor)

    found = answers(asked, log=tmp_path / "log", steer=steer, tensor_parallel=2, **TIGHT, **settings)
    assert_same(found, wanted)
    assert verify(tmp_path / "log").ok
    events = [record.event for record in LogReader(tmp_path / "log")]
    assert ev.Preempted in map(type, events), "no request was preempted"
    assert (ev.Encoded in map(type, events)) == ("encoder_piece" in settings)
    said = [event.error for event in events if isinstance(event, ev.Failed)]
    assert said == ["on purpose", "rank 1: on purpose"][: 1 + replays], "the planned failures did not happen"
    counts = seen[0].graph_counts
    if replays:
        steps, calls = counts["steps"], counts["encodings"]
        assert steps["prompt"] + steps["media"] > 0
        assert recorder.replayed >= steps["replayed"] + calls["replayed"]
        assert steps["replayed"] > 20 and calls["replayed"]
    else:
        assert counts == {}


def test_a_capture_that_fails_on_one_rank_fails_on_all(captured, monkeypatch):
    told = []
    monkeypatch.setattr(capture.log, "warning", lambda what, **facts: told.append(facts))
    recorder = captured(capture=2)
    with Engine(config=EngineConfig(tensor_parallel=2, max_num_seqs=4, spec="none")) as engine:
        (found,) = engine.generate(["Who are you?"], max_tokens=8)
        steps = engine.built.executor.graph_counts["steps"]
    with Engine(config=EngineConfig(spec="none")) as engine:
        assert found.token_ids == engine.generate(["Who are you?"], max_tokens=8)[0].token_ids
    assert steps["capture_failed"] >= 8 and not steps["replayed"] and not recorder.replayed
    assert [facts["reason"] for facts in told] == ["another rank failed or is out of step"]


def test_a_dead_rank_ends_the_engine_and_the_log_resumes(tmp_path):
    asked = {"request_id": "a", "max_tokens": 24, "ignore_eos": True}
    with Engine() as engine:
        whole = engine.generate(["Who are you?"], max_tokens=24, ignore_eos=True)[0].choices[0].token_ids
    with Engine(config=EngineConfig(tensor_parallel=2), log=tmp_path) as engine:
        engine.submit("Who are you?", **asked)
        engine.step()
        os.kill(engine.built.executor._followers._processes[0].pid, signal.SIGKILL)
        for _ in range(2):
            with pytest.raises(ExecutorLost, match="rank 1 of 2 was killed by signal 9; restart the engine"):
                while not engine.is_idle:
                    engine.step()
        assert "rank 1 of 2" in engine.readiness().reasons[0]
    with Engine(config=EngineConfig(tensor_parallel=2), log=tmp_path, resume=Resume()) as engine:
        found = engine.requests.resume("a")
        while not engine.is_idle:
            found = next((output.completion for output in engine.step() if output.completion), found)
    assert found.choices[0].token_ids == whole and verify(tmp_path).ok


@pytest.mark.parametrize("noticed_by", ["its words", "the next step"])
def test_a_diverged_rank_reports_it(noticed_by):
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
                send(*message)  # fails: the channel is closed, and rank 1's last messages are unread

        channel.send = send_and_wait
        engine.built.executor.frames.take = lambda: b"no frame"
        with pytest.raises(ExecutorLost, match="rank 1: .*cut short.*; .*restart the engine"):
            while not engine.is_idle:
                engine.step()


def test_a_ranks_early_failure_is_raised_when_its_step_is_collected():
    """Sending the step raises nothing, because rank 0 must still take part in the step."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        waiting = object.__new__(Followers)
        waiting._channels, waiting._lost = [Channel(ours)], ""
        Channel(theirs).send(MessageKind.FAILED, b"on purpose")
        waiting.step(b"frames")
        assert Channel(theirs).receive() == (MessageKind.STEP, b"frames")
        with pytest.raises(ExecutorFailed, match="rank 1: on purpose"):
            waiting.check()


def test_a_rank_that_reads_nothing_is_not_waited_for():
    # `send` to a rank that reads nothing raises after 0.1 s.
    ours, theirs = socket.socketpair()
    with ours, theirs, pytest.raises(ChannelClosed):
        Channel(ours, 0.1).send(MessageKind.STEP, bytes(2**26))


def test_heads_that_cannot_be_shared_are_refused_with_the_arithmetic():
    # Three ranks cannot share two KV heads.
    with pytest.raises(ConfigError, match="cannot cut 2 KV heads: 2 = 3 x 0 . 2; choose 1, 2"):
        plugin.load_model(checkpoint_path(), device="cpu", dtype="float32", shard=Shard(0, 3, lambda x: x))


def test_missing_gpus_are_refused():
    with pytest.raises(ConfigError, match="uses the first 2 GPUs"):
        CudaDevice(1).of_rank(0, 2)
    if torch.cuda.device_count() < 2:
        with pytest.raises(ConfigError, match="needs 2 GPUs, but torch sees"):
            CudaDevice().of_rank(0, 2)


def test_a_rank_that_cannot_start_says_why(tmp_path):
    followers = Followers(2, 60)
    try:
        followers.start(b"no job came before")
        with pytest.raises(ConfigError, match="rank 1 "):
            followers.await_ready(60)
    finally:
        followers.close()


# Weights


def test_the_ranks_parts_make_up_the_whole():
    config = read_config(checkpoint_path())
    device = torch.device("cpu")

    def shard(rank):
        return Shard(rank, 2, lambda x: x)

    with (
        open_weights(checkpoint_path(), NAMES, config, device, torch.float32) as whole,
        open_weights(checkpoint_path(), NAMES, config, device, torch.float32, shard(0)) as first,
        open_weights(checkpoint_path(), NAMES, config, device, torch.float32, shard(1)) as second,
    ):
        plan = {f"self_attn.{name}": axis for name, axis in ATTENTION.items()}
        for module, axis in (plan | {f"mlp.{name}": axis for name, axis in SWIGLU.items()}).items():
            name = f"text.layers.1.{module}.weight"
            parts = first.read(name), second.read(name)
            assert parts[0].shape[axis] * 2 == whole.read(name).shape[axis]
            assert torch.equal(torch.cat(parts, axis), whole.read(name))
        for name in ("text.norm.weight", "text.embed_tokens.weight", "text.layers.0.self_attn.q_norm.weight"):
            assert torch.equal(first.read(name), whole.read(name))


def test_a_rank_holds_only_its_part():
    def part_of(rank, size):
        shard = Shard(rank, size, lambda x: x)
        return plugin.load_model(checkpoint_path(), device="cpu", dtype="float32", shard=shard)

    whole, part = part_of(0, 1), part_of(1, 2)
    assert (part.spec.num_heads, part.spec.num_kv_heads) == (2, 1)
    assert (whole.spec.num_heads, whole.spec.num_kv_heads) == (4, 2)
    assert part._vision is None and part._text._head is None


def test_biases_are_cut_with_outputs_and_added_once_behind_inputs():
    # A rank has its part of q_proj's bias. o_proj's bias is added to the ranks' sum, so it is not cut.
    assert axis_of("text.layers.3.self_attn.q_proj.bias") == COLUMNS
    assert axis_of("text.layers.3.self_attn.o_proj.weight") == ROWS
    assert axis_of("text.layers.3.self_attn.o_proj.bias") is None
    assert axis_of("visual.blocks.0.mlp.linear_fc1.weight") is None
    assert axis_of("lm_head.weight") is None


def test_an_empty_parallel_plan_is_refused():
    with pytest.raises(ModelError, match="hold no text.layers.0.self_attn.q_proj.weight to cut"):
        check_plan(read_config(checkpoint_path()).text, {"model.layers.0.q_proj.weight"})
