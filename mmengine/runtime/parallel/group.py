"""The exchanges between a model's ranks within a step, always the same calls in the same order.

    encoded items' features, from rank 0      when the plan encodes any: pixels are on rank 0 alone
    token ids, from rank 0                    when a token may be sampled by a step that still runs
    2 sums a layer                            after attention and after the MLP

In a replayed step the last two are inside the graph, and the replay counts as a single call.

A rank that cannot continue within a step makes the remaining calls with zeros, and the remaining replay
without rows. So the other ranks never wait for it, and all ranks begin the next step together. The failed
step's result is discarded.
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


# the call, and the shape and dtype of its tensor
Exchange = tuple[Callable[[Tensor], None], tuple[int, ...], torch.dtype]


class GroupLost(ExecutorLost):
    """A rank is gone or missed an exchange's timeout. The group cannot be used any more."""


class StepGroup:
    """A rank's side in the exchanges. Call `join` first, and `prepare` once the model is loaded.

    `graphs`: captured steps, on all ranks. `replays`: whether a graph is being replayed.
    """

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size
        self.lost = self.replays = False
        self.graphs: DecodeGraphs | None = None
        self.timeout_s = 0.0
        self._group: Any = None  # torch's stubs declare no exchanges for a backend
        self._expected: list[Exchange | Replay] = []  # in reverse order

    def shard(self) -> Shard:
        return Shard(self.rank, self.size, self.all_reduce)

    def join(self, store: Path, device: Device, timeout_s: float) -> None:
        """Connect to the other ranks through the file `store`, which is new for each group. Blocks until all
        ranks are there.

        Uses NCCL between GPUs (not yet run on a GPU), gloo between processes on a CPU. Raises GroupLost.
        """
        self.timeout_s, timeout = timeout_s, timedelta(seconds=timeout_s)
        try:
            meeting = dist.FileStore(str(store), self.size)
            meeting.set_timeout(timeout)
            self._group = device.process_group(meeting, self.rank, self.size, timeout)
        except (RuntimeError, AttributeError, ValueError) as error:
            raise GroupLost(f"the ranks of tensor_parallel {self.size} could not connect: {error}") from error

    def prepare(self, spec: ModelSpec, placement: Placement, *, may_wait: bool) -> None:
        """Prepare exchanges for the model's `spec`. `may_wait`: whether a plan may hold PENDING tokens."""
        self._spec, self._dtype, self._device = spec, placement.dtype, placement.device
        self._may_wait = may_wait

    @contextmanager
    def step(self, plan: StepPlan, report: Callable[[Exception], None] | None = None) -> Iterator[None]:
        """Return a context for all exchanges in a step. Raises GroupLost.

        `report` gets an error inside the context before the other ranks can notice it; the error is then not
        raised.
        """
        self._expected = self._exchanges(plan)
        try:
            yield
        except BaseException as error:
            if self.lost:
                raise
            if report is None or not isinstance(error, Exception):
                self._complete_exchanges()
                raise
            report(error)
            self._complete_exchanges()
        else:
            self._complete_exchanges()

    @contextmanager
    def recording(self, bucket: Bucket) -> Iterator[None]:
        """Return a context for a pass that is captured, or launched before the capture.

        A failing pass leaves the other ranks in step.
        """
        self._expected = self._of_layers(bucket.num_tokens)[::-1]
        try:
            yield
        finally:
            if self._device.is_capturing():
                self._expected = []  # no exchange takes place now
            self._complete_exchanges()

    def replay(self, bucket: Bucket, launch: Callable[[], None]) -> None:
        """Launch the captured step with this size. Raises GroupLost if the launch fails, because the others
        wait for its exchanges.
        """
        if not self._expected or self._expected[-1] != (self.graphs, bucket):
            raise ExecutorFailed(f"rank {self.rank} wants to replay {bucket}, which no rank expects")
        self._expected.pop()
        self.replays = True
        try:
            launch()
        except Exception as error:
            self._raise_lost(f"rank {self.rank} could not replay a step: {error}", error)
        finally:
            self.replays = False

    def _exchanges(self, plan: StepPlan) -> list[Exchange | Replay]:
        expected: list[Exchange | Replay] = []
        if plan.encode:
            shape = (num_embeds(plan), (1 + self._spec.num_deepstack) * self._spec.hidden_size)
            expected.append((self._broadcast, shape, self._dtype))
        if not len(plan.input_ids):  # the step only encodes part of an item
            return expected
        graphs = self.graphs
        frame = graphs.find(plan) if graphs is not None else None
        if graphs is not None and isinstance(frame, Frame):
            expected.append(Replay(graphs, frame.bucket))
        else:
            expected += self._of_layers(len(plan.input_ids))
        return expected[::-1]

    def _of_layers(self, num_tokens: int) -> list[Exchange | Replay]:
        """Return the network's exchanges for `num_tokens` tokens, in order."""
        expected: list[Exchange | Replay] = []
        if self._may_wait:
            expected.append((self._broadcast, (num_tokens,), torch.int64))
        sums = (self._add_up, (num_tokens, self._spec.hidden_size), self._dtype)
        return expected + [sums] * (2 * self._spec.num_layers)

    def _complete_exchanges(self) -> None:
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
        except Exception as error:  # the replay could not be prepared
            self._raise_lost(f"rank {self.rank} could not replay a step: {error}", error)

    def all_reduce(self, x: Tensor) -> Tensor:
        """Return x [t, hidden] summed over all ranks, in place if x is contiguous."""
        return self._exchange(self._add_up, x)

    def features(self, features: Tensor) -> Tensor:
        """Return rank 0's features for the step's items; on other ranks the argument is overwritten."""
        return self._exchange(self._broadcast, features)

    def token_ids(self, input_ids: Tensor) -> Tensor:
        """Return rank 0's token ids, int64 [t], if other ranks may not know them yet."""
        return self._exchange(self._broadcast, input_ids) if self._may_wait else input_ids

    def _exchange(self, call: Callable[[Tensor], None], x: Tensor) -> Tensor:
        if self._group is None:  # before the ranks connect, a rank measures its memory alone
            return x
        if self.replays:  # in tests a function replaces the graph
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
            self._raise_lost(f"an exchange of rank {self.rank} with the others failed: {error}", error)

    def _raise_lost(self, what: str, error: Exception) -> NoReturn:
        self.lost = True
        raise error if isinstance(error, GroupLost) else GroupLost(what) from error

    def _add_up(self, x: Tensor) -> None:
        _in_order(self._group.allreduce, x, dist.AllreduceOptions())

    def _broadcast(self, x: Tensor) -> None:
        _in_order(self._group.broadcast, x, dist.BroadcastOptions())

    def abort(self) -> None:
        """Release everything on the device that waits for a dead rank. The group cannot be used
        afterwards.
        """
        self.lost = True
        if self._group is not None:
            self._device.abort_group(self._group)

    def close(self) -> None:
        self._group = None


def _in_order(call: Callable[[list[Tensor], Any], Any], x: Tensor, options: Any) -> None:
    """Run an exchange on the current stream, so that a graph needs no branches, and without waiting on a GPU.

    torch does the same for calls that are not async.
    """
    options.asyncOp = False
    work = call([x], options)
    if work is not None:
        work.wait()


def num_embeds(plan: StepPlan) -> int:
    """Return the embedding count that the step's encoder work gives."""
    return sum(item.request.media[item.index].num_embeds for item in plan.encode)
