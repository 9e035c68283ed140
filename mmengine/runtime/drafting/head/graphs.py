"""Captures a draft head's passes as CUDA graphs for several row counts, and replays them.

A pass usually computes a single layer, so its kernels take longer to launch than to run. A graph contains a
single pass, not a whole chain, because rows have different draft counts and the host plans attention for each
length. The host plans the next pass while the device computes.
"""

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from mmengine.core.executor import NO_DRAFT
from mmengine.runtime.attention.base import AttentionBackend, Bucket
from mmengine.runtime.device.port import Recorder
from mmengine.runtime.device.upload import upload_into
from mmengine.runtime.drafting.head.chain_rows import ChainRows
from mmengine.runtime.drafting.head.network import HeadNetwork
from mmengine.runtime.graphs.buckets import Frame, all_buckets, fill_up, row_sizes, size_for
from mmengine.runtime.graphs.capture import CAPTURE_FAILED, REPLAYED, Replays, capture_steps


class ChainGraphs:
    """A draft head's captured passes. Capturing writes to the dummy block in the head's KV pool.

    `most`: maximum number of drafts for a row, including drafts from other drafters. `num_chains`: number of
    chains by outcome: REPLAYED, or CAPTURE_FAILED if no graph exists.
    """

    def __init__(
        self,
        head: HeadNetwork,
        attention: AttentionBackend,
        recorder: Recorder,
        *,
        block_size: int,
        max_rows: int,
        most: int,
    ) -> None:
        self._head, self._attention, self._block_size = head, attention, block_size
        self._sizes, self._max_rows = row_sizes(max_rows), max_rows
        # All inputs share a tensor, for a single upload.
        self._inputs = torch.zeros(1 + max_rows * (1 + most), dtype=torch.int64, device=head.device)
        self._at = self._inputs[:1]  # the index of the current draft
        self._positions = self._inputs[1 : 1 + max_rows]  # the position of each row in the first pass
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
        """Draft a chain (see HeadNetwork.chain). Returns None if nothing is captured.

        The result is valid until the next chain.
        """
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
        """Return the initial `_inputs`: draft index 0, the positions, and `longest` rows for drafts."""
        count, first = len(rows.positions), 1 + self._max_rows
        packed = np.zeros(first + longest * self._max_rows, np.int64)
        packed[1 : 1 + count] = rows.positions
        packed[first:] = NO_DRAFT
        packed[first:].reshape(longest, -1)[:, :count] = rows.drafts()
        return packed

    def _first(self, bucket: Bucket) -> None:
        """Choose each row's first draft. A graph captures this call."""
        self._choose(self._z[: bucket.num_rows])

    def _pass(self, bucket: Bucket) -> None:
        """Compute a pass and choose each row's next draft. A graph captures this call."""
        size = bucket.num_rows
        tokens = self._drafts.index_select(0, self._at)[0, :size]
        positions = (self._positions[:size] + self._at).expand(3, -1)
        embeds = self._head.embed(tokens)
        z, carry = self._head.forward(self._carry[:size], embeds, positions, self._attention, 0)
        self._carry[:size].copy_(carry)
        # Capturing computes more passes than a chain has, hence the clamp.
        self._at.add_(1).clamp_(max=len(self._drafts) - 1)
        self._choose(z)

    def _choose(self, z: Tensor) -> None:
        drafts = self._drafts[:, : len(z)]
        given = drafts.index_select(0, self._at)[0]
        best = self._head.tokens(self._head.logits(z))
        drafts.index_copy_(0, self._at, torch.where(given == NO_DRAFT, best, given)[None])
