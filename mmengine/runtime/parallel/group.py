"""Tensor exchanges between a sharded model's ranks within a step.

All ranks make the same calls in the same order:

    encoded items' features, from rank 0      if the plan encodes items, because only rank 0 has pixels
    token ids, from rank 0                    if a token may come from a step that still runs
    2 sums per layer                          after attention and after the MLP

In a replayed step the token ids and the sums are exchanged inside the graph, and the replay counts as one
call.

A rank that fails within a step still makes the remaining calls with zeros, or replays the graph without rows.
The other ranks therefore never wait for the failed rank. The failed step's result is discarded.
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
    """A captured step's replay, which contains exchanges."""

    graphs: DecodeGraphs
    bucket: Bucket


# The call, and the exchanged tensor's shape and dtype.
Exchange = tuple[Callable[[Tensor], None], tuple[int, ...], torch.dtype]


class GroupLost(ExecutorLost):
    """A rank is gone or missed an exchange. The group cannot be used any more."""


class StepGroup:
    """One rank's exchanges. Call `join` first, and `prepare` when the model is loaded.

    `graphs`: the captured steps, which all ranks have, or None. `replays`: whether a graph is being replayed.
    """

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size
        self.lost = self.replays = False
        self.graphs: DecodeGraphs | None = None
        self.timeout_s = 0.0
        self._group: Any = None  # untyped, because torch's stubs declare no exchanges
        self._expected: list[Exchange | Replay] = []  # remaining calls in this step, the next call last

    def shard(self) -> Shard:
        return Shard(self.rank, self.size, self.all_reduce)

    def join(self, store: Path, device: Device, timeout_s: float) -> None:
        """Connect to the other ranks through the file `store`, and wait until all ranks are connected.

        Each group needs a new file. GPUs are connected by NCCL (not yet run on a GPU), processes on a CPU by
        gloo. Raises GroupLost if the ranks cannot connect within `timeout_s`.
        """
        self.timeout_s, timeout = timeout_s, timedelta(seconds=timeout_s)
        try:
            meeting = dist.FileStore(str(store), self.size)
            meeting.set_timeout(timeout)
            self._group = device.process_group(meeting, self.rank, self.size, timeout)
        except (RuntimeError, AttributeError, ValueError) as error:
            raise GroupLost(f"the ranks of tensor_parallel {self.size} could not connect: {error}") from error

    def prepare(self, spec: ModelSpec, placement: Placement, *, may_wait: bool) -> None:
        """Set the model's sizes. `may_wait`: whether plans may have PENDING tokens (still being sampled)."""
        self._spec, self._dtype, self._device = spec, placement.dtype, placement.device
        self._may_wait = may_wait

    @contextmanager
    def step(self, plan: StepPlan, report: Callable[[Exception], None] | None = None) -> Iterator[None]:
        """Return a context for all exchanges in a step. After an error in the context, the remaining calls
        are made with zeros.

        `report` receives the error before these calls; without `report` the error is raised. Raises GroupLost
        if an exchange fails.
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
        """Return a context for a captured pass or its warm-up.

        A failed warm-up pass still makes its remaining exchanges, so that no rank waits.
        """
        self._expected = self._of_layers(bucket.num_tokens)[::-1]
        try:
            yield
        finally:
            if self._device.is_capturing():
                self._expected = []  # during a capture no exchange takes place
            self._complete_exchanges()

    def replay(self, bucket: Bucket, launch: Callable[[], None]) -> None:
        """Replay the captured step for `bucket` by calling `launch`.

        Raises GroupLost if the launch fails, because the other ranks would wait for its exchanges.
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
        if not len(plan.input_ids):  # a step that only encodes a part of an item
            return expected
        graphs = self.graphs
        frame = graphs.find(plan) if graphs is not None else None
        if graphs is not None and isinstance(frame, Frame):
            expected.append(Replay(graphs, frame.bucket))
        else:
            expected += self._of_layers(len(plan.input_ids))
        return expected[::-1]

    def _of_layers(self, num_tokens: int) -> list[Exchange | Replay]:
        """Return the exchanges in a forward pass over `num_tokens` tokens, in order."""
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
        except Exception as error:  # preparing the replay failed
            self._raise_lost(f"rank {self.rank} could not replay a step: {error}", error)

    def all_reduce(self, x: Tensor) -> Tensor:
        """Return the sum of x [t, hidden] over all ranks, in place if x is contiguous."""
        return self._exchange(self._add_up, x)

    def features(self, features: Tensor) -> Tensor:
        """Return rank 0's `features`. On other ranks, rank 0's features overwrite the argument."""
        return self._exchange(self._broadcast, features)

    def token_ids(self, input_ids: Tensor) -> Tensor:
        """Return rank 0's token ids, int64 [t]. Exchanges them only if other ranks may lack some ids."""
        return self._exchange(self._broadcast, input_ids) if self._may_wait else input_ids

    def _exchange(self, call: Callable[[Tensor], None], x: Tensor) -> Tensor:
        if self._group is None:  # a rank measures its memory before the ranks connect
            return x
        if self.replays:  # only in tests: a replay calls the captured function again
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
        """End all device work that waits for a dead rank. The group cannot be used afterwards."""
        self.lost = True
        if self._group is not None:
            self._device.abort_group(self._group)

    def close(self) -> None:
        self._group = None


def _in_order(call: Callable[[list[Tensor], Any], Any], x: Tensor, options: Any) -> None:
    """Run an exchange on the current stream, so that a captured graph has no parallel branches. On a GPU, the
    host does not wait for the exchange.
    """
    options.asyncOp = False
    work = call([x], options)
    if work is not None:
        work.wait()


def num_embeds(plan: StepPlan) -> int:
    """Return how many embeddings the step's encoder work computes."""
    return sum(item.request.media[item.index].num_embeds for item in plan.encode)
