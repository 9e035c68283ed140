"""Drafts tokens for running rows with a draft head.

The head has its own KV pool, and shares the target model's block tables. The slot for position p contains the
head's KV for the target's hidden states at p and the token at p + 1. After each step the head reads the
target's states for accepted tokens. The KV for these tokens overwrites the KV for the head's drafts. Then the
head drafts from its own outputs, for rows that may have drafts.

If no row may have drafts, hidden states are stored for later (deferred.py). The drafter sleeps if too many
states are stored, or after too many consecutive steps in which no row may have drafts. A sleeping drafter
drops the stored states, and the target writes no more states. The drafter wakes up when rows may have drafts
again. Then only rows without gaps in the head's KV (keys.py) get drafts. These are mostly new rows.
"""

from typing import NamedTuple

import numpy as np
import torch

from mmengine.config import EngineConfig
from mmengine.core.executor import NO_DRAFT, StepPlan
from mmengine.models.plugin import AuxHiddenStates
from mmengine.ragged import NO_PLACE, counting
from mmengine.request import Request
from mmengine.runtime.attention.base import AttentionMeta
from mmengine.runtime.attention.registry import make_backend
from mmengine.runtime.device.port import Recorder
from mmengine.runtime.device.upload import upload
from mmengine.runtime.drafting.head.chain import draft
from mmengine.runtime.drafting.head.chain_rows import ChainRows
from mmengine.runtime.drafting.head.deferred import MOST_TOKENS, Deferred
from mmengine.runtime.drafting.head.graphs import ChainGraphs
from mmengine.runtime.drafting.head.keys import Keys
from mmengine.runtime.drafting.head.network import HeadNetwork, kv_spec
from mmengine.runtime.drafting.head.target_states import HeadBatch, TargetStates, accepted_tokens
from mmengine.runtime.inputs import fresh_blocks
from mmengine.runtime.kv.pool import pool_of
from mmengine.runtime.rows import RowColumns
from mmengine.spec_decode.base import Proposed
from mmengine.spec_decode.eagle3.config import MAX_DRAFTS
from mmengine.spec_decode.texts import Texts

MOST_STEPS = 256  # maximum number of consecutive steps without drafts before the drafter sleeps


class GivenDrafts(NamedTuple):
    """Other drafters' tokens for s rows, int32 [s, m], and each row's token count, intp [s]."""

    token_ids: np.ndarray
    counts: np.ndarray

    def first(self, rows: np.ndarray, count: int) -> np.ndarray:
        """Return the first `count` tokens for the row indices `rows` [n]. The result is int64 [n, count],
        padded with NO_DRAFT.
        """
        there = np.arange(count) < self.counts[rows, None]
        return np.where(there, self.token_ids[rows, :count], NO_DRAFT).astype(np.int64)


class HeadDrafter:
    """A drafter with a draft head. Raises ConfigError if the memory for its KV pool cannot be allocated.

    `rows`: the model runner's RowColumns. `number`: this drafter's index among all drafters. `is_asked`:
    whether any row may have drafts after the step that is being prepared. `graphs`: the captured passes, or
    None.
    """

    def __init__(self, head: HeadNetwork, rows: RowColumns, config: EngineConfig, number: int) -> None:
        spec = kv_spec(head.config, config.max_model_len)
        self.name = head.name
        self._head, self._rows, self._number = head, rows, number
        self._kv = pool_of(spec, config, head.placement)
        self._attention = make_backend(head.placement.attention, spec, self._kv)
        self._block_size = config.block_size
        self.graphs: ChainGraphs | None = None
        self.deferred = Deferred(config.max_num_seqs)
        self.keys = Keys(config.max_num_seqs, config.num_blocks, config.swap_blocks, config.block_size)
        self.is_asked, self._is_awake, self._num_idle = False, True, 0
        self._plan: StepPlan | None = None  # the plan of the last step that the head read
        self._place = np.zeros(config.max_num_seqs, np.intp)  # the index of each row in this step
        # The head's outputs in this step, for the last token that the head read in each row.
        self._z = self._carry = torch.empty(0)
        self._z_place = np.full(config.max_num_seqs, NO_PLACE, np.intp)  # the index of each row in `_z`

    def capture(self, recorder: Recorder, config: EngineConfig) -> None:
        """Capture the head's passes and replay them from now on, if the attention backend can be
        captured.
        """
        if self._attention.captures:
            self.graphs = ChainGraphs(
                self._head,
                self._attention,
                recorder,
                block_size=config.block_size,
                max_rows=config.max_num_seqs,
                most=config.num_draft_tokens,
            )

    def close(self) -> None:
        self._kv.close()

    def prepare(self, plan: StepPlan) -> AuxHiddenStates | None:
        """Prepare for the plan's forward pass. The plan's block copies are applied to the head's pool.

        Returns tensors to which the target writes its auxiliary states, or None if the head will never read
        this step's states.
        """
        if plan.admitted or plan.swap_out is not None or plan.copy is not None or plan.swap_in is not None:
            self._enter(plan)
        room = self._room(plan)
        self.is_asked = room is None or bool(room.any())
        if self.is_asked:
            self._num_idle = 0
            self.keys.settle()
            self._is_awake = bool(self.keys.whole[plan.rows].any())
        elif self._is_awake:
            self._num_idle += 1
            if self._num_idle > MOST_STEPS or self.deferred.num_tokens + len(plan.input_ids) > MOST_TOKENS:
                self._is_awake = False
                self.keys.lose(self.deferred.clear())
        if not self._is_awake:
            self.keys.skip(plan)
            return None
        if self._attention.reads_unwritten:
            fresh = fresh_blocks(plan.slot_mapping, self._block_size)
            if len(fresh):
                self._kv.clear(upload(fresh, self._head.device))
        return self.aux_hidden_states(len(plan.input_ids))

    def aux_hidden_states(self, num_tokens: int) -> AuxHiddenStates:
        """Return tensors for `num_tokens` tokens' auxiliary states."""
        config = self._head.config
        width = len(config.aux_layers) * config.target_hidden_size
        rows = torch.empty(num_tokens, width, dtype=self._head.dtype, device=self._head.device)
        return AuxHiddenStates(config.aux_layers, rows)

    def _enter(self, plan: StepPlan) -> None:
        """Copy blocks, and forget admitted rows' earlier requests."""
        self._kv.copy(plan)
        if plan.admitted:
            self.deferred.forget(np.array([admission.row for admission in plan.admitted]))
        self.keys.prepare(plan)

    def _room(self, plan: StepPlan) -> np.ndarray | None:
        """Return this drafter's entry in `StepPlan.draft_room`: each row's maximum draft count."""
        room = plan.draft_room
        return room[min(self._number, len(room) - 1)] if room is not None and len(room) else room

    def admit(self, row: int, request: Request, texts: Texts) -> bool:
        return True

    def leave(self, row: int, texts: Texts) -> None:
        """Do nothing: the head's KV is in the row's blocks, and is freed together with the blocks."""

    def wait(self, states: TargetStates) -> None:
        """Store a step's states until the next drafts are made."""
        self.keys.defer(states.plan)
        self.deferred.add(states)

    def catch_up(self, states: TargetStates | None, texts: Texts) -> None:
        """Read a step's states, and the stored states for rows that may have drafts.

        Reading a token's state writes the token's KV to the head's pool. If `states` is None, the head's KV
        has a gap in each of the step's rows, so no row gets drafts.
        """
        self._z_place[:] = NO_PLACE
        self._z = self._carry = torch.empty(0)
        if states is None:
            return
        plan = self._plan = states.plan
        rows = plan.rows.astype(np.intp)
        self._place[rows] = np.arange(len(rows))
        try:
            now, lacks = self.keys.whole[rows], np.zeros(len(rows), bool)
            late = now & self.deferred.is_late(rows) if self.deferred.num_tokens else lacks
            if self.keys.lacking:
                lacks = now & self.keys.lacks(rows, _slots_of(plan, now & ~late))
            late = late | lacks
            if late.any():
                self._read_late(states, rows, late, lacks, texts)
                now &= ~late
            # A pooled request's last token has no successor, and may be the row's only token in the step.
            now &= texts.lengths[rows] - 1 > plan.num_computed
            if now.any():
                self._read(accepted_tokens(states, rows, now, texts), texts)
        except Exception:
            self.keys.lose(np.append(rows, self.deferred.clear()))
            self._z_place[:] = NO_PLACE
            raise

    def _read_late(
        self, states: TargetStates, rows: np.ndarray, late: np.ndarray, lacks: np.ndarray, texts: Texts
    ) -> None:
        """Store the step's states for rows[late]. Then read the stored states for rows that may have drafts.

        Rows in `lacks` begin with prefix-cache hits that the head has not read. These rows first borrow the
        stored states from other rows with the same blocks. If too many states remain, all stored states are
        discarded.
        """
        plan, room = states.plan, self._room(states.plan)
        self.keys.defer(plan)
        self.deferred.add(states, late)
        selected = late if room is None else late & (room > 0)
        if (selected & lacks).any():
            selected &= ~lacks | self._lend(plan, rows, selected, lacks)
        if selected.any():
            head_batch = self.deferred.take(rows[selected], plan.block_table[selected], texts)
            if head_batch is not None:
                self._read(head_batch, texts)
        if self.deferred.num_tokens > MOST_TOKENS:
            self.keys.lose(self.deferred.clear())

    def _lend(self, plan: StepPlan, rows: np.ndarray, selected: np.ndarray, lacks: np.ndarray) -> np.ndarray:
        """Borrow stored states for rows in `lacks`, and return which rows could borrow, bool [n].

        The states belong to other rows with the same prefix blocks. Only rows that may have drafts
        (`selected`) borrow. If another row reads or borrows states for the same blocks in this step, a row
        does not borrow, and gets drafts in the next step at the earliest.
        """
        can, readers = np.zeros(len(rows), bool), rows[selected & ~lacks]
        claimed: set[int] = set()
        for place in np.flatnonzero(selected & lacks).tolist():
            row, table = int(rows[place]), plan.block_table[place]
            blocks = self.keys.lacking[row]
            if not claimed.isdisjoint(blocks.tolist()):
                continue
            claimed |= set(blocks.tolist())
            if np.isin(self.deferred.owners(blocks, self._block_size), readers).any():
                continue
            can[place] = self.deferred.lend(row, table, blocks, self._block_size)
            if can[place]:
                del self.keys.lacking[row]
            else:
                self.keys.lose(rows[place : place + 1])
        return can

    def _read(self, head_batch: HeadBatch, texts: Texts) -> None:
        rows, counts, ends = head_batch.rows, head_batch.counts, head_batch.starts + head_batch.counts
        if len(rows) == 1:
            following = texts.tokens[rows[0], int(head_batch.starts[0]) + 1 : int(ends[0]) + 1]
        else:
            index = counting(counts) + np.repeat(head_batch.starts, counts)
            following = texts.tokens[np.repeat(rows, counts), index + 1]
        self._attention.begin(
            AttentionMeta(counts.astype(np.int32), ends.astype(np.int32), head_batch.slots, head_batch.table)
        )
        hidden = self._head.fuse(head_batch.aux_hidden_states)
        embeds = self._head.embed(upload(following.astype(np.int64), self._head.device))
        z, carry = self._head.forward(hidden, embeds, head_batch.positions, self._attention, 0)
        self.keys.mark_written(head_batch)
        last = np.cumsum(counts) - 1
        if head_batch.is_all is not None:
            rows, last = rows[head_batch.is_all], last[head_batch.is_all]
        if len(last) < len(z):
            places = upload(last, self._head.device)
            z, carry = z.index_select(0, places), carry.index_select(0, places)
        first = len(self._z)
        if first:
            z, carry = torch.cat((self._z, z)), torch.cat((self._carry, carry))
        self._z, self._carry = z, carry
        self._z_place[rows] = np.arange(first, len(z))

    def propose(
        self, rows: np.ndarray, texts: Texts, most: np.ndarray, given: GivenDrafts | None = None
    ) -> Proposed | None:
        """Propose drafts (see Drafter in spec_decode/base.py). `given`: other drafters' tokens, after which
        the head drafts.
        """
        counts = np.where(self._z_place[rows] == NO_PLACE, 0, np.minimum(most, MAX_DRAFTS))
        selected = np.flatnonzero(counts)
        if not len(selected) or self._plan is None:
            return None
        rows, asked = rows[selected], counts[selected]
        before = np.zeros(len(rows), np.intp) if given is None else given.counts[selected]
        longest = int((asked + before).max())
        places, ends = self._z_place[rows], texts.lengths[rows] - 1
        chain = ChainRows(
            (asked + before).astype(np.int32),
            ends.astype(np.int32),
            (ends + self._rows.columns["delta"][rows]).astype(np.int32),
            self._plan.block_table[self._place[rows]],
            None if given is None else given.first(selected, longest),
        )
        z, carry = self._z, self._carry
        if len(z) > 1:
            index = upload(places, z.device)
            z, carry = z.index_select(0, index), carry.index_select(0, index)
        drafts = draft(self._head, z, carry, chain, self._attention, 0, self._block_size, self.graphs)
        own = drafts != NO_DRAFT
        if given is not None:
            own &= np.arange(longest) >= before[:, None]
        return Proposed(drafts[own].astype(np.int32), counts)


def _slots_of(plan: StepPlan, selected: np.ndarray) -> np.ndarray:
    """Return the slots in the rows with `selected` True (bool [n])."""
    return plan.slot_mapping[np.repeat(selected, plan.num_scheduled)]
