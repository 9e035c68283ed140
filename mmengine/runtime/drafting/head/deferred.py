"""Stores waiting tokens: the tokens that a draft head has not read yet.

While no row may have drafts, the head does not run, and each step's tokens are only stored. Before the next
drafts, each token is assigned to its row, and rejected drafts are removed. A finished request's tokens have
no row, but a request with the same prefix blocks can copy them.
"""

import msgspec
import numpy as np
import torch

from mmengine.ragged import counting
from mmengine.runtime.device.upload import upload
from mmengine.runtime.drafting.head.target_states import HeadBatch, TargetStates
from mmengine.spec_decode.texts import Texts

MOST_TOKENS = 2048  # maximum number of waiting tokens; with the included checkpoint, their states take 6 MiB
# MERGED is the step number for all tokens that `_merged` has already joined. UNOWNED is the row of tokens
# from finished requests.
MERGED, UNOWNED = -1, -1
AT_ONCE = 1024  # maximum number of waiting tokens that the head reads in a step, so that no step takes long


class Tokens(msgspec.Struct, frozen=True, eq=False):
    """t waiting tokens, in the order in which they were computed."""

    rows: np.ndarray  # intp [t], UNOWNED for the tokens of finished requests
    index: np.ndarray  # int32 [t], the position of each token in its request
    slots: np.ndarray  # int64 [t]
    positions: torch.Tensor  # int64 [3, t]
    aux_hidden_states: torch.Tensor  # [t, aux_layers * target_hidden_size]

    def pick(self, places: np.ndarray) -> "Tokens":
        on_device = upload(places, self.aux_hidden_states.device)
        return Tokens(
            self.rows[places],
            self.index[places],
            self.slots[places],
            self.positions.index_select(1, on_device),
            self.aux_hidden_states.index_select(0, on_device),
        )


class Deferred:
    """All waiting tokens in the engine. `num_tokens`: how many tokens are stored."""

    def __init__(self, num_rows: int) -> None:
        self.num_tokens = 0
        self._left: Tokens | None = None  # tokens of earlier steps, which were merged
        self._steps: list[tuple[TargetStates, np.ndarray | None]] = []
        self._num_noted = 0  # number of steps that `_has_any` includes
        self._has_any = np.zeros(num_rows, bool)
        # For each row, the index in `_steps` of the first step with tokens of the row's current request.
        # MERGED: merged tokens belong to this request too.
        self._since = np.full(num_rows, MERGED)

    def add(self, states: TargetStates, late: np.ndarray | None = None) -> None:
        """Store a step's tokens, from all rows or only from the rows with `late` True (bool [n])."""
        self._steps.append((states, late))
        self.num_tokens += len(states.plan.input_ids)

    def is_late(self, rows: np.ndarray) -> np.ndarray:
        """Return which of `rows` [n] have waiting tokens, bool [n]."""
        for states, late in self._steps[self._num_noted :]:
            self._has_any[states.plan.rows if late is None else states.plan.rows[late]] = True
        self._num_noted = len(self._steps)
        return self._has_any[rows]

    def forget(self, rows: np.ndarray) -> None:
        """Make the waiting tokens in `rows` [n] UNOWNED, because new requests get these rows."""
        if self.is_late(rows).any():
            self._since[rows] = len(self._steps)
            self._has_any[rows] = False

    def owners(self, blocks: np.ndarray, block_size: int) -> np.ndarray:
        """Return the owners of the waiting tokens in `blocks`: rows, and UNOWNED for finished requests."""
        tokens = self._merged()
        return np.unique(tokens.rows[np.isin(tokens.slots // block_size, blocks)])

    def lend(self, row: int, table: np.ndarray, blocks: np.ndarray, block_size: int) -> bool:
        """Copy other requests' waiting tokens in `blocks` to `row`, whose request begins with these blocks.

        `table`: the row's block table, int32 [b]. Returns False if tokens that precede the row's own
        waiting tokens are missing.
        """
        tokens = self._merged()
        at = tokens.index // block_size
        there = (at < len(table)) & (tokens.rows != row) & np.isin(tokens.slots // block_size, blocks)
        lent = np.flatnonzero(there & (table[np.minimum(at, len(table) - 1)] == tokens.slots // block_size))
        own, found = tokens.index[tokens.rows == row], np.unique(tokens.index[lent])
        size = len(blocks) * block_size
        if not len(own) or not np.array_equal(found, np.arange(own.min() - size, own.min())):
            return False
        copies = tokens.pick(lent)
        copies.rows[:] = row
        self._keep(_joined([copies, tokens]))
        return True

    def clear(self) -> np.ndarray:
        """Discard all waiting tokens. Returns the rows that had waiting tokens, intp."""
        rows = np.flatnonzero(self.is_late(np.arange(len(self._has_any))))
        self._steps, self._left, self.num_tokens, self._num_noted = [], None, 0, 0
        self._has_any[:], self._since[:] = False, MERGED
        return rows

    def take(self, rows: np.ndarray, table: np.ndarray, texts: Texts) -> HeadBatch | None:
        """Remove and return at most AT_ONCE waiting tokens in `rows`, row by row; None if there are none.

        `rows`: intp [n]. `table`: these rows' block tables, int32 [n, b].
        """
        tokens = self._merged()
        stands = (tokens.index < texts.lengths[tokens.rows] - 1) | (tokens.rows == UNOWNED)
        place = np.full(len(self._has_any) + 1, UNOWNED)  # the last entry is for UNOWNED
        place[rows] = np.arange(len(rows))
        owner = np.where(stands, place[tokens.rows], UNOWNED)
        others = np.flatnonzero(stands & (owner == UNOWNED))
        order = np.lexsort((tokens.index, owner))[np.count_nonzero(owner == UNOWNED) :]
        key = np.stack((owner[order], tokens.index[order]))
        # If a position was computed twice, the first token was a rejected draft, so the last token is kept.
        order = order[np.append((key[:, 1:] != key[:, :-1]).any(axis=0), True)] if len(order) else order
        counts = np.bincount(owner[order], minlength=len(rows))
        given = np.clip(AT_ONCE - (np.cumsum(counts) - counts), 0, counts)
        is_given = counting(counts) < np.repeat(given, counts)
        self._keep(tokens.pick(np.sort(np.concatenate((others, order[~is_given])))))
        selected = np.flatnonzero(given)
        if not len(selected):
            return None
        now, counts, given = tokens.pick(order[is_given]), counts[selected], given[selected]
        starts = now.index[np.cumsum(given) - given]
        parts = (now.slots, now.positions, now.aux_hidden_states)
        return HeadBatch(rows[selected], given, starts, table[selected], *parts, is_all=given == counts)

    def _keep(self, tokens: Tokens) -> None:
        """Make `tokens` the only waiting tokens."""
        self.clear()
        if len(tokens.rows):
            self._left, self.num_tokens = tokens, len(tokens.rows)
            self._has_any[tokens.rows[tokens.rows != UNOWNED]] = True

    def _merged(self) -> Tokens:
        """Merge all stored steps, and return the waiting tokens. Requires at least one waiting token."""
        parts = []
        if self._left is not None:
            self._left.rows[self._since[self._left.rows] > MERGED] = UNOWNED
            parts.append(self._left)
        if self._steps:
            parts.append(self._waiting())
        if self._steps:
            self._keep(_joined(parts))
        assert self._left is not None  # guaranteed by the callers
        return self._left

    def _waiting(self) -> Tokens:
        """Return the waiting tokens from steps that are not merged yet."""
        plans = [states.plan for states, _ in self._steps]
        rows = np.concatenate([plan.rows for plan in plans]).astype(np.intp)
        counts = np.concatenate([plan.num_scheduled for plan in plans])
        waits = np.concatenate(
            [np.ones(len(states.plan.rows), bool) if late is None else late for states, late in self._steps]
        )
        step = np.repeat(np.arange(len(plans)), [len(plan.rows) for plan in plans])
        rows[step < self._since[rows]] = UNOWNED
        tokens = Tokens(
            np.repeat(rows, counts),
            np.concatenate([plan.token_index for plan in plans]),
            np.concatenate([plan.slot_mapping for plan in plans]),
            torch.cat([states.positions for states, _ in self._steps], 1),
            torch.cat([states.aux_hidden_states for states, _ in self._steps]),
        )
        return tokens if waits.all() else tokens.pick(np.flatnonzero(np.repeat(waits, counts)))


def _joined(parts: list[Tokens]) -> Tokens:
    if len(parts) == 1:
        return parts[0]
    return Tokens(
        np.concatenate([part.rows for part in parts]),
        np.concatenate([part.index for part in parts]),
        np.concatenate([part.slots for part in parts]),
        torch.cat([part.positions for part in parts], 1),
        torch.cat([part.aux_hidden_states for part in parts]),
    )
