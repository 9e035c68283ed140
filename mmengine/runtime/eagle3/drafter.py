"""An EAGLE-3 head that drafts for the running rows, one token behind another.

Its keys and values lie in layers of their own behind the same block table: the slot of x[p] holds what the
head made of the target's states at p and of x[p + 1]. After each step all rows catch up: what the target
computed in it, as far as it stands, takes the place of what the head had guessed there. Rows that may draft
go on from there by the head's own output, into slots that the next step takes back or catches up.
"""

import msgspec
import numpy as np
import torch

from mmengine.config import EngineConfig
from mmengine.core.executor import StepPlan
from mmengine.models.plugin import ModelSpec, Taps
from mmengine.request import Request
from mmengine.runtime.attention.base import AttentionMeta
from mmengine.runtime.attention.registry import make_backend
from mmengine.runtime.eagle3.head import DraftHead
from mmengine.runtime.inputs import fresh_blocks
from mmengine.runtime.kv import KVPool
from mmengine.runtime.rows import RowColumns
from mmengine.runtime.upload import upload
from mmengine.spec_decode.base import Proposed
from mmengine.spec_decode.eagle3.config import HeadConfig
from mmengine.spec_decode.texts import Texts


class Seen(msgspec.Struct, frozen=True, eq=False):
    """A step of the target, as the head reads it: t tokens of n rows."""

    plan: StepPlan
    positions: torch.Tensor  # int64 [3, t]
    taps: torch.Tensor  # [t, taps * target_hidden_size]


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
        self._caught_up: torch.Tensor | None = None  # carry of each row of the step, of its last state
        self._drafted: torch.Tensor | None = None  # and the first draft behind it, int64 [n]
        self._place = np.zeros(config.max_num_seqs, np.intp)  # of a row in that step

    def taps(self, num_tokens: int) -> Taps:
        """Room for what a step's forward leaves for the head."""
        config = self._head.config
        width = len(config.tap_layers) * config.target_hidden_size
        rows = torch.empty(num_tokens, width, dtype=self._head.dtype, device=self._head.device)
        return Taps(config.tap_layers, rows)

    def prepare(self, plan: StepPlan) -> None:
        """Before the forward of `plan`: its copies of blocks are this pool's too."""
        self._kv.copy(plan)
        if self._attention.reads_unwritten:
            fresh = fresh_blocks(plan.slot_mapping, self._block_size)
            if len(fresh):
                self._kv.clear(upload(fresh, self._head.device))

    def admit(self, row: int, request: Request, texts: Texts) -> bool:
        return True

    def leave(self, row: int, texts: Texts) -> None:
        """What it holds of a row lies in blocks, and goes with them."""

    def catch_up(self, seen: Seen, texts: Texts) -> None:
        """Write the KV of all states of a step behind which the next token is known."""
        plan, self._seen = seen.plan, seen
        rows = plan.rows.astype(np.intp)
        counts = np.minimum(plan.num_scheduled, texts.lengths[rows] - 1 - plan.num_computed)
        self._place[rows] = np.arange(len(rows))
        ends = np.cumsum(counts)
        step = np.arange(int(ends[-1])) - np.repeat(ends - counts, counts)
        places = step + np.repeat(np.cumsum(plan.num_scheduled) - plan.num_scheduled, counts)
        following = texts.tokens[np.repeat(rows, counts), plan.token_index[places] + 1]
        packed = upload(np.concatenate((places, following, ends - 1)), self._head.device)
        places_there, next_ids, last = packed.split((len(places), len(places), len(rows)))
        meta = AttentionMeta(
            counts.astype(np.int32),
            (plan.num_computed + counts).astype(np.int32),
            plan.slot_mapping[places],
            plan.block_table,
        )
        hidden = self._head.fuse(seen.taps.index_select(0, places_there))
        z, carry = self._run(hidden, next_ids, seen.positions.index_select(1, places_there), meta)
        self._caught_up = carry.index_select(0, last)
        self._drafted = self._best(z.index_select(0, last))

    def propose(self, rows: np.ndarray, texts: Texts, most: np.ndarray) -> Proposed | None:
        places, lengths = self._place[rows], texts.lengths[rows]
        picked = np.flatnonzero(most > 0)
        if not len(picked):
            return None
        there = upload(places[picked], self._head.device)
        carry, last = self._caught_up.index_select(0, there), self._drafted.index_select(0, there)
        columns = [last]
        going = picked
        for depth in range(1, int(most.max())):
            kept = most[going] > depth
            if not kept.all():
                index = upload(kept.nonzero()[0], self._head.device)
                carry, last, going = carry.index_select(0, index), last.index_select(0, index), going[kept]
            carry, last = self._further(carry, last, rows[going], places[going], lengths[going] - 2 + depth)
            columns.append(last)
        drafts = [column.cpu().numpy() for column in columns]
        matrix = np.zeros((len(rows), len(drafts)), np.int32)
        for depth, column in enumerate(drafts):
            matrix[np.flatnonzero(most > depth), depth] = column
        return Proposed(matrix[np.arange(len(drafts)) < most[:, None]], most)

    def _further(
        self, carry: torch.Tensor, last: torch.Tensor, rows: np.ndarray, places: np.ndarray, index: np.ndarray
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """One draft more of each row: the head's own output stands for the state at `index` (int64 [r])."""
        table = self._seen.plan.block_table[places]
        blocks = table[np.arange(len(index)), index // self._block_size].astype(np.int64)
        slots = blocks * self._block_size + (index & (self._block_size - 1))
        positions = upload(index + self._rows.columns["delta"][rows], self._head.device).expand(3, -1)
        meta = AttentionMeta(np.ones(len(index), np.int32), (index + 1).astype(np.int32), slots, table)
        z, carry = self._run(carry, last, positions, meta)
        return carry, self._best(z)

    def _run(
        self, hidden: torch.Tensor, next_ids: torch.Tensor, positions: torch.Tensor, meta: AttentionMeta
    ) -> tuple[torch.Tensor, torch.Tensor]:
        self._attention.begin(meta)
        return self._head.forward(hidden, self._head.embed(next_ids), positions, self._attention, 0)

    def _best(self, z: torch.Tensor) -> torch.Tensor:
        return self._head.tokens(self._head.logits(z))


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
