"""The pool of state slots: who holds one, and what those that nobody holds are kept for.

A slot takes the recurrent states of one sequence in all layers that have any. A row holds one from its
admission to its end. The others may hold a *kept* state, that behind a full block, found by the block's
content id, so that a request which begins with that block's content can go on from there.
"""

import numpy as np

from mmengine.core.state.columns import NEVER, ReadOnlyArray
from mmengine.core.state.prefix_index import NO_CONTENT
from mmengine.events.vocabulary import NO_STATE


class StateSlots:
    """Columns by slot. `block_content`: content ids by block, int64. Only `evolve` calls methods that change
    it."""

    def __init__(self, num_slots: int, block_content: np.ndarray):
        self._block_content = block_content
        self.num_free = num_slots  # that no row holds, with a kept state or without
        self.held = np.zeros(num_slots, np.bool_)  # by a row
        self.content = np.full(num_slots, NO_CONTENT, np.int64)  # of the block behind which a state is kept
        self.block = np.zeros(num_slots, np.int32)  # that block
        self.used = np.zeros(num_slots, np.int64)  # when the kept state was used last, counted by `clock`
        self.clock = 0
        self._by_content: dict[int, int] = {}

    def find(self, content: int) -> int:
        """The slot with the state behind a block of this content, or NO_STATE."""
        return self._by_content.get(content, NO_STATE)

    def peek(self, count: int) -> np.ndarray:
        """Return up to `count` slots that are given out next, int32: slots without a kept state, then slots
        whose block has other content now, then the longest unused slots."""
        free = np.flatnonzero(~self.held)
        kept = self.content[free] != NO_CONTENT
        found = kept & (self._block_content[self.block[free]] == self.content[free])
        order = np.lexsort((free, self.used[free], found, kept))
        return free[order[:count]].astype(np.int32)

    def take(self, slot: int, source: int) -> None:
        """A row holds the slot, and goes on from the state kept in `source`, if that is one."""
        if source not in (NO_STATE, slot):
            self.clock += 1
            self.used[source] = self.clock
        self._forget(slot)
        self.held[slot] = True
        self.num_free -= 1

    def release(self, slot: int) -> None:
        self.held[slot] = False
        self.num_free += 1

    def keep(self, slot: int, content: int, block: int) -> None:
        """The slot keeps the state behind `block`, which holds `content`."""
        self._forget(slot)
        self.clock += 1
        self.content[slot], self.block[slot], self.used[slot] = content, block, self.clock
        self._by_content[content] = slot

    def forget(self, slots: np.ndarray) -> None:
        """Kept states that cannot be relied on."""
        for slot in slots.tolist():
            self._forget(slot)

    def clear(self) -> None:
        """Nothing is kept any more."""
        self.content[:], self.block[:], self.used[:] = NO_CONTENT, 0, 0
        self._by_content.clear()

    def columns(self) -> tuple[np.ndarray, ...]:
        return self.held, self.content, self.block, self.used

    def fill(self, columns: tuple[np.ndarray, ...], clock: int) -> None:
        """Take over what `columns` gave. Raises ValueError where it contradicts itself."""
        for mine, values in zip(self.columns(), columns, strict=True):
            mine[:] = values
        self.num_free, self.clock = int(np.count_nonzero(~self.held)), clock
        kept = np.flatnonzero(self.content != NO_CONTENT)
        self._by_content = dict(zip(self.content[kept].tolist(), kept.tolist(), strict=True))
        if len(self._by_content) < len(kept) or self.held[kept].any():
            raise ValueError("a state is kept twice, or in a row's slot")

    def _forget(self, slot: int) -> None:
        content = int(self.content[slot])
        if content != NO_CONTENT:
            del self._by_content[content]
            self.content[slot], self.block[slot], self.used[slot] = NO_CONTENT, 0, 0


def any_due(keep_at: ReadOnlyArray | np.ndarray, num_computed: ReadOnlyArray | np.ndarray) -> bool:
    """Whether some row may have a state to keep, drafts that it computed counted as sure. Whole columns are
    compared faster than the rows of a step are gathered, and in most steps there is none."""
    return bool((keep_at <= num_computed).any())


def next_kept(after: int, num_prompt: int, num_shared: int, every: int, block_size: int) -> int:
    """Behind how many tokens, more than `after`, the state of a row is kept next: at multiples of `every`,
    where the request leaves what others began with, and at the last block before the prompt's last token,
    which a request with the same prompt computes for its logits. Whole blocks all of them."""
    every = -(-every // block_size) * block_size
    places = [num_shared, (num_prompt - 1) // block_size * block_size]
    if every:
        places.append((after // every + 1) * every)
    return min((place for place in places if place > after), default=int(NEVER))
