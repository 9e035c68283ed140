"""What the ranks of a model exchange within a step, always the same calls in the same order.

    features of encoded items, from rank 0    when the plan encodes any: pixels are on rank 0 alone
    token ids, from rank 0                    when a token may be sampled by a step that still runs
    2 sums a layer                            behind attention and behind the MLP

Where a step is replayed, the last two are within the graph, and the replay counts as one call.

A rank that cannot go on within a step makes the calls that are left with zeros, and the replay that is left
without rows, so that the others never wait for it and the next step begins with all of them in the same
place; what the step gave is thrown away.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor

from mmengine.core.executor import StepPlan
from mmengine.errors import ExecutorFailed, ExecutorLost
from mmengine.models.plugin import ModelSpec
from mmengine.models.sharding import Shard
from mmengine.runtime.attention.base import Bucket
from mmengine.runtime.device.placement import Placement
from mmengine.runtime.device.port import Device
from mmengine.runtime.graphs.buckets import Frame
from mmengine.runtime.graphs.decode import DecodeGraphs


class Replay(NamedTuple):
    """The exchanges within a captured step."""

    graphs: DecodeGraphs
    bucket: Bucket


Exchange = tuple[Callable[[Tensor], None], tuple[int, ...], torch.dtype]  # how, and of what


class GroupLost(ExecutorLost):
    """A rank is gone, or did not come to an exchange in time. The group cannot be used any more."""


class StepGroup:
    """One rank's side. `join` first, `prepare` when the model is there. `graphs`: those that steps are
    replayed from, on all ranks. `replays`: whether that is being done."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size
        self.lost = self.replays = False
        self.graphs: DecodeGraphs | None = None
        self.timeout_s = 0.0
        self._group: Any = None  # of torch's stubs, no backend has exchanges
        self._expected: list[Exchange | Replay] = []  # the next one last

    def shard(self) -> Shard:
        return Shard(self.rank, self.size, self.all_reduce)

    def join(self, store: Path, device: Device, timeout_s: float) -> None:
        """Meet the other ranks, which name the same file `store`, new for each group. Blocks until all are
        there. Raises GroupLost. NCCL between GPUs (not yet run on a GPU), gloo between processes on a CPU."""
        self.timeout_s, timeout = timeout_s, timedelta(seconds=timeout_s)
        try:
            meeting = dist.FileStore(str(store), self.size)
            meeting.set_timeout(timeout)
            self._group = device.process_group(meeting, self.rank, self.size, timeout)
        except (RuntimeError, AttributeError, ValueError) as error:
            raise GroupLost(f"the ranks of tensor_parallel {self.size} could not meet: {error}") from error

    def prepare(self, spec: ModelSpec, placement: Placement, *, may_wait: bool) -> None:
        """`spec`: that of the model. `may_wait`: whether a plan may hold PENDING tokens."""
        self._spec, self._dtype, self._device = spec, placement.dtype, placement.device
        self._may_wait = may_wait

    @contextmanager
    def step(self, plan: StepPlan, report: Callable[[Exception], None] | None = None) -> Iterator[None]:
        """Around all exchanges of a step. `report` hears of what went wrong within, before the others can
        know of it, and it is not raised then. Raises GroupLost."""
        self._expected = self._exchanges(plan)
        try:
            yield
        except BaseException as error:
            if self.lost:
                raise
            if report is None or not isinstance(error, Exception):
                self._make_the_rest()
                raise
            report(error)
            self._make_the_rest()
        else:
            self._make_the_rest()

    @contextmanager
    def recording(self, bucket: Bucket) -> Iterator[None]:
        """Around one pass of a step of this size while it is captured, or launched before that. One that
        fails leaves the others in step."""
        self._expected = self._of_layers(bucket.num_tokens)[::-1]
        try:
            yield
        finally:
            if self._device.is_capturing():
                self._expected = []  # nothing of it is exchanged now
            self._make_the_rest()

    def replay(self, bucket: Bucket, launch: Callable[[], None]) -> None:
        """`launch` what was captured for this size. Raises GroupLost where that fails: what the others wait
        for is in it."""
        if not self._expected or self._expected[-1] != (self.graphs, bucket):
            raise ExecutorFailed(f"rank {self.rank} wants to replay {bucket}, which no rank expects")
        self._expected.pop()
        self.replays = True
        try:
            launch()
        except Exception as error:
            self._lose(f"rank {self.rank} could not replay a step: {error}", error)
        finally:
            self.replays = False

    def _exchanges(self, plan: StepPlan) -> list[Exchange | Replay]:
        expected: list[Exchange | Replay] = []
        if plan.encode:
            shape = (num_embeds(plan), (1 + self._spec.num_deepstack) * self._spec.hidden_size)
            expected.append((self._broadcast, shape, self._dtype))
        if not len(plan.input_ids):  # a part of an item alone
            return expected
        graphs = self.graphs
        frame = graphs.find(plan) if graphs is not None else None
        if graphs is not None and isinstance(frame, Frame):
            expected.append(Replay(graphs, frame.bucket))
        else:
            expected += self._of_layers(len(plan.input_ids))
        return expected[::-1]

    def _of_layers(self, num_tokens: int) -> list[Exchange | Replay]:
        """What the network exchanges over so many tokens, in order."""
        expected: list[Exchange | Replay] = []
        if self._may_wait:
            expected.append((self._broadcast, (num_tokens,), torch.int64))
        sums = (self._add_up, (num_tokens, self._spec.hidden_size), self._dtype)
        return expected + [sums] * (2 * self._spec.num_layers)

    def _make_the_rest(self) -> None:
        while self._expected:
            following = self._expected[-1]
            if isinstance(following, Replay):
                self._replay_empty(following)
                continue
            call, shape, dtype = following
            self._expected.pop()
            self._call(call, torch.zeros(shape, dtype=dtype, device=self._device.torch_device))

    def _replay_empty(self, replay: Replay) -> None:
        try:
            replay.graphs.run_empty(replay.bucket)
        except GroupLost:
            raise
        except Exception as error:  # it could not be prepared
            self._lose(f"rank {self.rank} could not replay a step: {error}", error)

    def all_reduce(self, x: Tensor) -> Tensor:
        """The sum of all ranks' x [t, hidden], in place where x has no gaps."""
        return self._exchange(self._add_up, x)

    def features(self, features: Tensor) -> Tensor:
        """Rank 0's features of the items that the step encodes; elsewhere what is given is written to."""
        return self._exchange(self._broadcast, features)

    def token_ids(self, input_ids: Tensor) -> Tensor:
        """Rank 0's token ids int64 [t], where others may not know them yet."""
        return self._exchange(self._broadcast, input_ids) if self._may_wait else input_ids

    def _exchange(self, call: Callable[[Tensor], None], x: Tensor) -> Tensor:
        if self._group is None:  # before the ranks meet: a rank measures its memory alone
            return x
        if self.replays:  # a function in a graph's place
            self._call(call, x)
            return x
        if not self._expected or self._expected[-1] != (call, tuple(x.shape), x.dtype):
            raise ExecutorFailed(f"rank {self.rank} wants to exchange {list(x.shape)}, which no rank expects")
        x = x.contiguous()
        self._expected.pop()
        self._call(call, x)
        return x

    def _call(self, call: Callable[[Tensor], None], x: Tensor) -> None:
        try:
            call(x)
        except RuntimeError as error:
            self._lose(f"an exchange of rank {self.rank} with the others failed: {error}", error)

    def _lose(self, what: str, error: Exception) -> NoReturn:
        self.lost = True
        raise error if isinstance(error, GroupLost) else GroupLost(what) from error

    def _add_up(self, x: Tensor) -> None:
        _in_order(self._group.allreduce, x, dist.AllreduceOptions())

    def _broadcast(self, x: Tensor) -> None:
        _in_order(self._group.broadcast, x, dist.BroadcastOptions())

    def abort(self) -> None:
        """What waits on the device for a rank that is gone does not any more. The group is of no use then."""
        self.lost = True
        if self._group is not None:
            self._device.abort_group(self._group)

    def close(self) -> None:
        self._group = None


def _in_order(call: Callable[[list[Tensor], Any], Any], x: Tensor, options: Any) -> None:
    """On a GPU launched on the stream of the kernels around it, as torch launches what is not asked for as
    async: a graph needs no branches for it. There is nothing to wait for then."""
    options.asyncOp = False
    work = call([x], options)
    if work is not None:
        work.wait()


def num_embeds(plan: StepPlan) -> int:
    """Embeddings that the step's encoder work gives."""
    return sum(item.request.media[item.index].num_embeds for item in plan.encode)
