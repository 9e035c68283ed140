"""The free KV blocks, in the order in which requests get them.

First come blocks without cached content, the most recently freed block first (a stack). Then come blocks with
cached content, the least recently used block first (a queue). If a free cached block is used again, its entry
stays in the queue but is dead. `take` increments the block's stamp, and entries with an older stamp are
skipped.
"""

import numpy as np


class FreeList:
    """A pool's free blocks. Block 0 pads batches and is never free."""

    def __init__(self, num_blocks: int):
        self.num_free = num_blocks - 1
        self._stamp = np.zeros(num_blocks, np.int32)
        capacity = 4 * num_blocks + 16
        self._stack = np.zeros(capacity, np.int32)
        self._stack_stamp = np.zeros(capacity, np.int32)
        self._top = 0
        self._queue = np.zeros(capacity, np.int32)
        self._queue_stamp = np.zeros(capacity, np.int32)
        self._head = 0
        self._tail = num_blocks - 1
        self._queue[: self._tail] = np.arange(1, num_blocks, dtype=np.int32)

    def peek(self, count: int) -> np.ndarray:
        """Return the next `count` blocks, int32, without taking them. There must be enough blocks."""
        if self._top:
            line, stamps = self._stack[: self._top][::-1], self._stack_stamp[: self._top][::-1]
        else:
            line, stamps = self._queue[self._head : self._tail], self._queue_stamp[self._head : self._tail]
        chosen = line[:count]
        if count <= len(line) and (self._no_dead_entry() or self._is_live(chosen, stamps[:count]).all()):
            return chosen.copy()
        return self.order(count)

    def order(self, count: int | None = None) -> np.ndarray:
        """Return the next `count` free blocks, int32, in the order in which requests get them. `count` None:
        all free blocks.
        """
        stack = self._stack[: self._top][::-1]
        live = stack[self._is_live(stack, self._stack_stamp[: self._top][::-1])]
        missing = None if count is None else count - len(live)
        if missing is not None and missing <= 0:
            return live[:count]
        parts, start = [live], self._head
        window = self._tail if missing is None else max(64, 2 * missing)
        while start < self._tail and (missing is None or missing > 0):
            end = min(start + window, self._tail)
            queue = self._queue[start:end]
            live = queue[self._is_live(queue, self._queue_stamp[start:end])]
            parts.append(live if missing is None else live[:missing])
            missing = None if missing is None else missing - len(live)
            start = end
        return np.concatenate(parts)

    def lines(self) -> tuple[np.ndarray, np.ndarray]:
        """Return (stack, queue), both int32. The stack has the free blocks without content, and its last
        block comes next. The queue has the free blocks with content, and its first block comes next.
        """
        stack, queue = self._stack[: self._top], self._queue[self._head : self._tail]
        on_stack = self._is_live(stack, self._stack_stamp[: self._top])
        return stack[on_stack], queue[self._is_live(queue, self._queue_stamp[self._head : self._tail])]

    def fill(self, stack: np.ndarray, queue: np.ndarray) -> None:
        """Replace the free blocks by a stack and a queue from `lines`. Raises ValueError if a block occurs
        twice or block 0 occurs.
        """
        blocks = np.concatenate((stack, queue))
        if len(np.unique(blocks)) < len(blocks) or (blocks < 1).any():
            raise ValueError("the free list holds a block twice, or holds the dummy block")
        self.num_free = len(blocks)
        self._stamp[:] = self._stack_stamp[:] = self._queue_stamp[:] = 0
        self._top, self._head, self._tail = len(stack), 0, len(queue)
        self._stack[: self._top], self._queue[: self._tail] = stack, queue

    def take(self, blocks: np.ndarray) -> None:
        """Remove these blocks, int32, from the free list."""
        head, no_dead_entry = self._head + len(blocks), self._no_dead_entry()
        self.num_free -= len(blocks)
        if not self._top and self._queue[self._head : head].tobytes() == blocks.tobytes():
            self._head = head
            # A removed entry may be dead, and the block's live entry then follows later in the queue. The new
            # stamp makes this live entry dead too.
            if not no_dead_entry:
                self._stamp[blocks] += 1
        else:
            self._stamp[blocks] += 1
            self._trim()

    def give_front(self, blocks: np.ndarray) -> None:
        """Add blocks without content. The last block is used next."""
        if self._top + len(blocks) > len(self._stack):
            self._top = _compact(self, self._stack, self._stack_stamp, 0, self._top)
        end = self._top + len(blocks)
        self._stack[self._top : end] = blocks
        self._stack_stamp[self._top : end] = self._stamp[blocks]
        self._top = end
        self.num_free += len(blocks)

    def give_back(self, blocks: np.ndarray) -> None:
        """Add blocks with content to the queue's end. The first block is used first."""
        if self._tail + len(blocks) > len(self._queue):
            self._tail = _compact(self, self._queue, self._queue_stamp, self._head, self._tail)
            self._head = 0
        end = self._tail + len(blocks)
        self._queue[self._tail : end] = blocks
        self._queue_stamp[self._tail : end] = self._stamp[blocks]
        self._tail = end
        self.num_free += len(blocks)

    def _no_dead_entry(self) -> bool:
        return self._top + self._tail - self._head == self.num_free

    def _is_live(self, blocks: np.ndarray, stamps: np.ndarray) -> np.ndarray:
        return self._stamp[blocks] == stamps

    def _trim(self) -> None:
        """Drop dead entries from the stack's top and from the queue's head."""
        while self._top:
            low = max(0, self._top - 256)
            live = self._is_live(self._stack[low : self._top], self._stack_stamp[low : self._top])
            dead = int(live[::-1].argmax())  # number of dead entries above the topmost live entry
            if live[-1 - dead]:
                self._top -= dead
                break
            self._top = low
        while self._head < self._tail:
            high = min(self._tail, self._head + 256)
            live = self._is_live(self._queue[self._head : high], self._queue_stamp[self._head : high])
            dead = int(live.argmax())
            if live[dead]:
                self._head += dead
                break
            self._head = high


def _compact(owner: FreeList, blocks: np.ndarray, stamps: np.ndarray, start: int, end: int) -> int:
    """Move the live entries in [start, end) to the array's front. Returns the number of live entries."""
    live = owner._is_live(blocks[start:end], stamps[start:end])
    kept = int(live.sum())
    blocks[:kept], stamps[:kept] = blocks[start:end][live], stamps[start:end][live]
    return kept
