"""The process for a tensor-parallel rank above 0 (a follower). A follower applies rank 0's log, and computes
its shard in each step.

A follower decides nothing, samples nothing and writes no log. Rank 0 starts the follower
(parallel/followers.py), which ends when its channel closes.
"""

import os
import signal
import socket
import sys
import threading
import time
from functools import partial
from pathlib import Path
from typing import NoReturn

import torch

from mmengine.core.executor import StepPlan
from mmengine.core.snapshot.snapshot import restore
from mmengine.errors import CorruptLog
from mmengine.models.plugin import ModelPlugin, VisionLanguageModel
from mmengine.models.registry import plugin_for
from mmengine.runtime.device.dtypes import DTYPES
from mmengine.runtime.device.placement import Placement
from mmengine.runtime.device.registry import open_device
from mmengine.runtime.device.threads import choose_threads
from mmengine.runtime.graphs.capture import recorder_for
from mmengine.runtime.parallel.channel import Channel, ChannelClosed, MessageKind
from mmengine.runtime.parallel.graphs import capture_steps
from mmengine.runtime.parallel.group import StepGroup, num_embeds
from mmengine.runtime.parallel.job import decode_job, error_sentence
from mmengine.runtime.parallel.mirror import Mirror
from mmengine.runtime.runner import ModelRunner
from mmengine.runtime.sampling.runs import runs_of

LOOK_S = 1.0  # time between checks that rank 0 is alive, in seconds


class RankModel:
    """This rank's shard of the model. Token ids that this rank does not know yet come from rank 0."""

    def __init__(self, model: VisionLanguageModel, group: StepGroup) -> None:
        self._embed, self._group = model.embed, group
        self.spec, self.batch_invariant = model.spec, False  # sharded models do not support batch invariance
        self.encode, self.forward, self.logits = model.encode, model.forward, model.logits

    def embed(self, input_ids: torch.Tensor) -> torch.Tensor:
        return self._embed(self._group.token_ids(input_ids))


class FollowingRunner(ModelRunner):
    """Computes steps up to the hidden states. Only rank 0 samples. Encoder features come from rank 0."""

    def follow(self, plan: StepPlan, group: StepGroup, dtype: torch.dtype) -> None:
        with torch.inference_mode():
            for admission in plan.admitted:
                self._rows.admit(admission)
            for key in plan.evict:
                self._features.drop(key)
            if plan.encode:
                self._receive(plan, group, dtype)
            if len(plan.rows):
                self._forward(plan, runs_of(plan), None)
            else:
                self._kv.copy(plan)

    def _receive(self, plan: StepPlan, group: StepGroup, dtype: torch.dtype) -> None:
        spec = self._model.spec
        width = (1 + spec.num_deepstack) * spec.hidden_size
        features = group.features(torch.empty(num_embeds(plan), width, dtype=dtype, device=self._device))
        sizes = [item.request.media[item.index].num_embeds for item in plan.encode]
        self._features.put([item.key for item in plan.encode], sizes, features)


def follow(channel: Channel) -> NoReturn:
    """Load the model that the JOB on the channel describes, then compute steps until the channel closes.

    Raises ChannelClosed when the channel closes, and any error that occurs outside of a step.
    """
    job = decode_job(_expect(channel, MessageKind.JOB))
    placement = Placement(open_device(job.device), DTYPES[job.dtype], job.attention)
    placement.device.set_current()
    group, folder = StepGroup(job.rank, job.size), Path(job.folder)
    plugin = plugin_for(folder)
    where = str(placement.device.torch_device)
    model = plugin.load_model(folder, device=where, dtype=job.dtype, shard=group.shard())
    torch.set_num_threads(choose_threads(job.num_threads, model.spec.hidden_size, ranks=job.size).count)
    channel.send(MessageKind.READY)
    group.join(Path(job.store), placement.device, job.timeout_s)
    mirror = Mirror(restore(_expect(channel, MessageKind.START))[0])
    runner = _runner(mirror, plugin, model, group, placement)
    channel.send(MessageKind.READY)
    recorder = recorder_for(mirror.state.config, placement.device)
    capture_steps(runner, recorder, group, partial(_agree, channel))
    while True:
        plan = mirror.fold(_expect(channel, MessageKind.STEP))
        if plan is None:
            raise CorruptLog("rank 0 runs a step that its log does not hold")
        with group.step(plan, lambda error: channel.send(MessageKind.FAILED, error_sentence(error).encode())):
            runner.follow(plan, group, placement.dtype)


def _runner(
    mirror: Mirror, plugin: ModelPlugin, model: VisionLanguageModel, group: StepGroup, placement: Placement
) -> FollowingRunner:
    config = mirror.state.config
    group.prepare(model.spec, placement, may_wait=config.max_in_flight > 1)
    return FollowingRunner(RankModel(model, group), plugin.positions, config, placement, stop_watcher=None)


def _agree(channel: Channel, word: str) -> bool:
    channel.send(MessageKind.WORD, word.encode())
    return _expect(channel, MessageKind.WORD) != b""


def _expect(channel: Channel, wanted: MessageKind) -> bytes:
    message = channel.receive()
    if message is None or message[0] is not wanted:
        raise ChannelClosed(f"{message and message[0].name} came in place of {wanted.name}")
    return message[1]


def _end_with(parent: int) -> None:
    """Exit when rank 0 ends. The main thread cannot notice this end while it waits on the device for a dead
    rank.
    """
    while os.getppid() == parent:
        time.sleep(LOOK_S)
    os._exit(1)


def main() -> int:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all processes, but rank 0 ends the others
    threading.Thread(target=_end_with, args=(os.getppid(),), daemon=True).start()
    channel = Channel(socket.socket(fileno=int(sys.argv[1])))
    try:
        follow(channel)
    except ChannelClosed:
        return 0
    except Exception as error:
        try:
            channel.send(MessageKind.ENDS, error_sentence(error).encode())
        except ChannelClosed:  # rank 0 has ended, and its end caused the error
            return 0
        return 1


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    os._exit(code)  # skips the shutdown of the process group, which might wait for dead ranks
