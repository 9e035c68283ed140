"""The pool of slots for recurrent states.

A slot contains one sequence's recurrent states for all layers. Each running row owns a slot. A free slot may
contain a *kept* state: the state after a full block. A request whose prefix ends with this block can continue
from the kept state.
"""

from collections.abc import Iterator

import numpy as np

from mmengine.core.state.columns import NEVER, ReadOnlyArray
from mmengine.core.state.prefix_index import NO_CONTENT
from mmengine.events.vocabulary import NO_STATE


class StateSlots:
    """One engine's state slots. Only `evolve` in core/fold may change the slots. `block_content`: each KV
    block's content id, int64.
    """

    def __init__(self, num_slots: int, block_content: np.ndarray):
        self._block_content = block_content
        self.num_free = num_slots  # number of slots that no row owns
        self.held = np.zeros(num_slots, np.bool_)  # whether a row owns the slot
        # The content id of the last block in the kept state, or NO_CONTENT.
        self.content = np.full(num_slots, NO_CONTENT, np.int64)
        self.block = np.zeros(num_slots, np.int32)  # the id of the kept state's block
        self.used = np.zeros(num_slots, np.int64)  # the value of `clock` at the kept state's last use
        self.clock = 0
        self._by_content: dict[int, int] = {}

    def find(self, content: int) -> int:
        """Return the slot whose kept state follows the block with this content id, or NO_STATE."""
        return self._by_content.get(content, NO_STATE)

    def kept(self) -> Iterator[tuple[int, int]]:
        """Yield (content id, slot) for each kept state that `find` returns."""
        yield from self._by_content.items()

    def peek(self, count: int) -> np.ndarray:
        """Return the next slots to use, at most `count`, int32. Slots without a kept state come first, then
        slots whose block was overwritten, then the least recently used slots.
        """
        free = np.flatnonzero(~self.held)
        kept = self.content[free] != NO_CONTENT
        found = kept & (self._block_content[self.block[free]] == self.content[free])
        order = np.lexsort((free, self.used[free], found, kept))
        return free[order[:count]].astype(np.int32)

    def take(self, slot: int, source: int) -> None:
        """Give the slot to a row. `source`: the slot whose kept state the row continues from, or NO_STATE."""
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
        """Record that the slot contains the state after `block`, whose content id is `content`."""
        self._forget(slot)
        self.clock += 1
        self.content[slot], self.block[slot], self.used[slot] = content, block, self.clock
        self._by_content[content] = slot

    def forget(self, slots: np.ndarray) -> None:
        """Forget the kept states in these slots, because a failed step made them invalid."""
        for slot in slots.tolist():
            self._forget(slot)

    def clear(self) -> None:
        """Forget all kept states."""
        self.content[:], self.block[:], self.used[:] = NO_CONTENT, 0, 0
        self._by_content.clear()

    def columns(self) -> tuple[np.ndarray, ...]:
        return self.held, self.content, self.block, self.used

    def fill(self, columns: tuple[np.ndarray, ...], clock: int) -> None:
        """Restore the values that `columns` returned. Raises ValueError if they contradict each other."""
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
    """Return whether any row may have a state to keep after this step. The test runs in every step. To
    stay fast, the test may return True although no row is due.
    """
    return bool((keep_at <= num_computed).any())


def next_kept(after: int, num_prompt: int, num_shared: int, every: int, block_size: int) -> int:
    """Return the next token count after `after` at which a row's state is kept, or NEVER.

    States are kept at multiples of `every` (rounded up to full blocks) and after the first `num_shared`
    tokens, the prefix that was cached at admission. States are also kept after the last full block before the
    last prompt token. A later request with the same prompt continues there and computes the last token for
    its logits.
    """
    every = -(-every // block_size) * block_size
    places = [num_shared, (num_prompt - 1) // block_size * block_size]
    if every:
        places.append((after // every + 1) * every)
    return min((place for place in places if place > after), default=int(NEVER))
