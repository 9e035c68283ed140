"""An EAGLE-3 head that drafts for the running rows, one token behind another.

Its keys and values lie in layers of their own behind the same block table: the slot of x[p] holds what the
head made of the target's states at p and of x[p + 1]. After each step all rows catch up: what the target
computed in it, as far as it stands, takes the place of what the head had guessed there. Rows that may draft
go on from there by the head's own output, into slots that the next step takes back or catches up.
"""

import numpy as np
import torch

from mmengine.config import EngineConfig
from mmengine.core.executor import StepPlan
from mmengine.models.plugin import ModelSpec, Taps
from mmengine.ragged import counting
from mmengine.request import Request
from mmengine.runtime.attention.base import AttentionMeta
from mmengine.runtime.attention.registry import make_backend
from mmengine.runtime.eagle3.chain import NO_DRAFT, draft
from mmengine.runtime.eagle3.chain_rows import ChainRows
from mmengine.runtime.eagle3.deferred import Deferred
from mmengine.runtime.eagle3.head import DraftHead
from mmengine.runtime.eagle3.seen import Seen
from mmengine.runtime.inputs import fresh_blocks
from mmengine.runtime.kv import KVPool
from mmengine.runtime.rows import RowColumns
from mmengine.runtime.upload import upload
from mmengine.spec_decode.base import Proposed
from mmengine.spec_decode.eagle3.config import HeadConfig
from mmengine.spec_decode.texts import Texts


class Eagle3Drafter:
    """`rows` are the runner's columns. Raises ConfigError where the pool of its KV cannot be had."""

    name = "eagle3"

    def __init__(self, head: DraftHead, rows: RowColumns, config: EngineConfig, attention: str) -> None:
        spec = kv_spec(head.config)
        self._head, self._rows = head, rows
        self._kv = KVPool(
            spec, config.num_blocks, config.block_size, head.dtype, head.device, config.swap_blocks
        )
        self._attention = make_backend(attention, spec, self._kv)
        self._block_size = config.block_size
        self._seen: Seen | None = None
        self.deferred = Deferred()
        self._z = self._carry = torch.empty(0)  # of each row of the step, at its last state
        self._place = np.zeros(config.max_num_seqs, np.intp)  # of a row in that step

    def taps(self, num_tokens: int) -> Taps:
        """Room for what a step's forward leaves for the head."""
        config = self._head.config
        width = len(config.tap_layers) * config.target_hidden_size
        rows = torch.empty(num_tokens, width, dtype=self._head.dtype, device=self._head.device)
        return Taps(config.tap_layers, rows)

    def prepare(self, plan: StepPlan) -> None:
        """Before the forward of `plan`: its copies of blocks are this pool's too."""
        if self.deferred and not self.deferred.goes_on(plan):
            self._read(self.deferred.take(), None)
        self._kv.copy(plan)
        if self._attention.reads_unwritten:
            fresh = fresh_blocks(plan.slot_mapping, self._block_size)
            if len(fresh):
                self._kv.clear(upload(fresh, self._head.device))

    def admit(self, row: int, request: Request, texts: Texts) -> bool:
        return True

    def leave(self, row: int, texts: Texts) -> None:
        """What it holds of a row lies in blocks, and goes with them."""

    def catch_up(self, seen: Seen, texts: Texts, idle: bool = False) -> None:
        """Write the KV of all states of a step behind which the next token is known. `idle`: nobody drafts
        behind it, so it may be done later."""
        waits = (idle or len(self.deferred) > 0) and self.deferred.takes(seen)
        if waits:
            self.deferred.add(seen, texts)
            if idle:
                return
        if self.deferred:
            self._read(self.deferred.take(), texts)
        if not waits:
            self._read(seen, texts)

    def _read(self, seen: Seen, texts: Texts | None) -> None:
        """`texts`: not asked where the step says what follows."""
        plan, self._seen = seen.plan, seen
        rows, counts = plan.rows.astype(np.intp), plan.num_scheduled
        if seen.following is None:
            counts = np.minimum(counts, texts.lengths[rows] - 1 - plan.num_computed)
        self._place[rows] = np.arange(len(rows))
        taps, positions, slots = seen.taps, seen.positions, plan.slot_mapping
        if len(rows) == 1:  # what stands of a row alone is the step's beginning: nothing is picked
            count = int(counts[0])
            at = int(plan.num_computed[0]) + 1
            following = seen.following
            if following is None:
                following = texts.tokens[rows[0], at : at + count].astype(np.int64)
            next_ids = upload(following, self._head.device)
            taps, positions, slots = taps[:count], positions[:, :count], slots[:count]
            last = slice(count - 1, count)
        else:
            places, last = _standing(counts, plan.num_scheduled)
            following = seen.following
            if following is None:
                following = texts.tokens[np.repeat(rows, counts), plan.token_index[places] + 1]
            packed = upload(np.concatenate((places, following, last)), self._head.device)
            index, next_ids, last = packed.split((len(places), len(places), len(rows)))
            taps, positions = taps.index_select(0, index), positions.index_select(1, index)
            slots = slots[places]
        meta = AttentionMeta(
            counts.astype(np.int32),
            (plan.num_computed + counts).astype(np.int32),
            slots,
            plan.block_table,
        )
        self._attention.begin(meta)
        hidden, embeds = self._head.fuse(taps), self._head.embed(next_ids)
        z, carry = self._head.forward(hidden, embeds, positions, self._attention, 0)
        self._z, self._carry = z[last], carry[last]

    def propose(self, rows: np.ndarray, texts: Texts, most: np.ndarray) -> Proposed | None:
        is_asked = most > 0
        if not is_asked.all():
            rows, asked = rows[is_asked], most[is_asked]
            if not len(rows):
                return None
        else:
            asked = most
        places, ends = self._place[rows], texts.lengths[rows] - 1
        chain = ChainRows(
            asked.astype(np.int32),
            ends.astype(np.int32),
            (ends + self._rows.columns["delta"][rows]).astype(np.int32),
            self._seen.plan.block_table[places],
        )
        z, carry = self._z, self._carry
        if len(z) > 1:
            index = torch.from_numpy(places)
            z, carry = z.index_select(0, index), carry.index_select(0, index)
        drafts = draft(self._head, z, carry, chain, self._attention, 0, self._block_size)
        return Proposed(drafts[drafts != NO_DRAFT].astype(np.int32), most)


def _standing(counts: np.ndarray, num_scheduled: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Where in a step the tokens stand that count, `counts` of each row's `num_scheduled`, row after row; and
    the last of each row among those."""
    starts = np.cumsum(num_scheduled) - num_scheduled
    return counting(counts) + np.repeat(starts, counts), np.cumsum(counts) - 1


def kv_spec(config: HeadConfig) -> ModelSpec:
    """The sizes of a head's KV, as those of a model."""
    return ModelSpec(
        num_layers=config.num_layers,
        num_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        hidden_size=config.hidden_size,
        vocab_size=config.vocab_size,
        max_model_len=0,
        num_deepstack=0,
        patch_width=0,
    )
