"""A head's passes, captured once for each number of rows and replayed: a pass is one layer, which launching
takes longer than computing.

What is captured is a pass over inputs that stay where they are, not a chain: rows have different numbers of
drafts, and attention is planned on the host for each length. So a pass of fewer rows follows one of more, and
while the device computes one, the next is planned.
"""

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from mmengine.core.executor import NO_DRAFT
from mmengine.runtime.attention.base import AttentionBackend, Bucket
from mmengine.runtime.device.port import Recorder
from mmengine.runtime.device.upload import upload_into
from mmengine.runtime.drafting.eagle3.chain_rows import ChainRows
from mmengine.runtime.drafting.eagle3.head import DraftHead
from mmengine.runtime.graphs.buckets import Frame, all_buckets, fill_up, row_sizes, size_for
from mmengine.runtime.graphs.capture import CAPTURE_FAILED, REPLAYED, Replays, capture_steps


class ChainGraphs:
    """`most`: drafts of one row, with those that are given. Captured at once: the dummy block of the head's
    pool is written to. `num_chains`: how many were replayed, and how many were not, by why."""

    def __init__(
        self,
        head: DraftHead,
        attention: AttentionBackend,
        recorder: Recorder,
        *,
        block_size: int,
        max_rows: int,
        most: int,
    ) -> None:
        self._head, self._attention, self._block_size = head, attention, block_size
        self._sizes, self._max_rows = row_sizes(max_rows), max_rows
        # In one piece, because they are uploaded together.
        self._inputs = torch.zeros(1 + max_rows * (1 + most), dtype=torch.int64, device=head.device)
        self._at = self._inputs[:1]  # how many drafts of each row there are
        self._positions = self._inputs[1 : 1 + max_rows]  # of the first pass
        self._drafts = self._inputs[1 + max_rows :].view(most, max_rows)
        width = head.config.hidden_size
        self._z, self._carry = (
            torch.zeros(max_rows, width, dtype=head.dtype, device=head.device) for _ in range(2)
        )
        self.num_chains = {REPLAYED: 0, CAPTURE_FAILED: 0}
        self._firsts, self._passes = self._capture(recorder)

    def _capture(self, recorder: Recorder) -> tuple[Replays, Replays]:
        def all_of(compute: Callable[[Bucket], None]) -> Replays:
            buckets = all_buckets(self._max_rows, 0)
            return capture_steps(
                "a head's passes", buckets, compute, self._attention, recorder, self._block_size
            )

        firsts = all_of(self._first)
        return firsts, all_of(self._pass) if firsts else {}

    def chain(self, z: Tensor, carry: Tensor, rows: ChainRows) -> Tensor | None:
        """See DraftHead.chain; good until the next chain. None where nothing is captured."""
        if not self._passes:
            self.num_chains[CAPTURE_FAILED] += 1
            return None
        self.num_chains[REPLAYED] += 1
        count, longest = len(z), int(rows.most.max())
        upload_into(self._packed(rows, longest), self._inputs)
        self._z[:count].copy_(z)
        self._carry[:count].copy_(carry)
        self._firsts[self._frame(count).bucket]()
        for ahead in range(longest - 1):
            active = int(np.count_nonzero(rows.most > ahead + 1))
            meta, frame = rows.meta(ahead, active, self._block_size), self._frame(active)
            self._attention.begin(fill_up(meta, frame, self._block_size), frame.bucket)
            self._passes[frame.bucket]()
        return self._drafts[:longest, :count]

    def _frame(self, count: int) -> Frame:
        return Frame(Bucket(size_for(count, self._sizes), 1), slice(0, count))

    def _packed(self, rows: ChainRows, longest: int) -> np.ndarray:
        """The beginning of `_inputs`: no draft, positions, and of `longest` drafts those that are given."""
        count, first = len(rows.positions), 1 + self._max_rows
        packed = np.zeros(first + longest * self._max_rows, np.int64)
        packed[1 : 1 + count] = rows.positions
        packed[first:] = NO_DRAFT
        packed[first:].reshape(longest, -1)[:, :count] = rows.drafts()
        return packed

    def _first(self, bucket: Bucket) -> None:
        """Is captured: the first draft of each row."""
        self._choose(self._z[: bucket.num_rows])

    def _pass(self, bucket: Bucket) -> None:
        """Is captured: the draft behind the last one."""
        size = bucket.num_rows
        tokens = self._drafts.index_select(0, self._at)[0, :size]
        positions = (self._positions[:size] + self._at).expand(3, -1)
        embeds = self._head.embed(tokens)
        z, carry = self._head.forward(self._carry[:size], embeds, positions, self._attention, 0)
        self._carry[:size].copy_(carry)
        self._at.add_(1).clamp_(max=len(self._drafts) - 1)  # recording makes passes that no chain has
        self._choose(z)

    def _choose(self, z: Tensor) -> None:
        drafts = self._drafts[:, : len(z)]
        given = drafts.index_select(0, self._at)[0]
        best = self._head.tokens(self._head.logits(z))
        drafts.index_copy_(0, self._at, torch.where(given == NO_DRAFT, best, given)[None])
