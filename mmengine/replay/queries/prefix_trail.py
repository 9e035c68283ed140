"""Follows the blocks of a request's prefix through the prefix cache: which requests computed the blocks, when
the blocks were evicted, and which requests reused the memory.
"""

from typing import Any

import msgspec
import numpy as np

from mmengine.core.state.blocks import block_extras, content_windows
from mmengine.core.state.prefix_index import ROOT
from mmengine.core.state.state import State
from mmengine.events import vocabulary as ev
from mmengine.events.codec import Record
from mmengine.request import Request


class Loss(msgspec.Struct, frozen=True):
    """A period in which a prefix block was cached, and the reason why the period ended.

    `since`, `by`: the step and the request that computed the block. `until`: the step in which the block left
    the cache, or -1 while it is cached. `why`: the reason, such as an eviction or a cache reset. `taken_by`:
    the request that got the block's memory. `note`: a remark if this build's scheduler would have evicted
    other blocks than the log records; otherwise "".
    """

    since: int
    by: str
    until: int = -1
    why: str = ""
    taken_by: str = ""
    note: str = ""


class PrefixTrail:
    """Follows the blocks that are prefix cache hits for a request, from the log's first record.

    The caller applies each record to the state, and then calls `after`. `tokens` (int32 [n]): the request's
    tokens at admission. `ahead`: a block's hash includes media up to this number of tokens after the block
    (see `block_extras`). `by`: the request that counts as the source of a block if no running request holds
    the block.
    """

    def __init__(self, state: State, request: Request, tokens: np.ndarray, ahead: int, by: str = ""):
        size, width = state.block_size, state.content_width
        self.num_blocks = (len(tokens) - 1) // size
        self._windows = content_windows(tokens, 0, self.num_blocks, size, width)
        self._parts = state.blocks.index.token_parts(self._windows).tolist()
        self._extras = block_extras(request, 0, self.num_blocks, size, ahead, state.config.whole_prompt)
        self._by = by
        self._blocks: list[int] = []  # The ids of the cached prefix blocks, in order.
        self._content: list[int] = []
        # Maps a block's index in the prefix to the block's latest Loss.
        self.losses: dict[int, Loss] = {}

    @property
    def length(self) -> int:
        """The number of cached prefix blocks."""
        return len(self._blocks)

    def loses(self, event: ev.Event) -> bool:
        """Return whether the event evicts a prefix block. Call before the event is applied."""
        new = getattr(event, "new_blocks", b"")
        return bool(new) and bool(np.isin(self._blocks, np.frombuffer(new, np.int32)).any())

    def after(self, state: State, record: Record, expected: ev.Event | None = None) -> None:
        """Update the trail with a record that was just applied. `expected`: the event that this build's
        scheduler would have logged instead, or None if unknown.
        """
        index = state.blocks.index
        if self._blocks:
            same = index.content[self._blocks] == self._content
            if not same.all():
                self._cut(state, record, int(np.argmin(same)), expected)
        while self.length < self.num_blocks:
            number = self.length
            parent = self._content[-1] if self._content else ROOT
            extra = self._extras.get(number, b"")
            block = index.find(parent, self._parts[number], self._windows[number], extra)
            if block < 0:
                return
            self._blocks.append(block)
            self._content.append(int(index.content[block]))
            if self.losses.get(number) is None or self.losses[number].until >= 0:
                self.losses[number] = Loss(record.step, _holder(state, block) or self._by)

    def _cut(self, state: State, record: Record, length: int, expected: ev.Event | None) -> None:
        why, taken_by = _cause(state, record, self._blocks[length:])
        new, note = np.frombuffer(getattr(expected, "new_blocks", b""), np.int32), ""
        if why == "taken" and expected is not None and self._blocks[length] not in new:
            note = ", although this build's rules would have taken other blocks"
        lost = range(length, self.length)
        del self._blocks[length:], self._content[length:]
        for number in lost:
            old = self.losses[number]
            self.losses[number] = Loss(old.since, old.by, record.step, why, taken_by, note)

    def difference(self, state: State) -> dict[str, Any]:
        """Return how the prefix's first uncached block differs from the cached blocks at its position.

        In the returned dict, `kind` is "tokens", "media or salt", or "nothing" if no block is cached at this
        position. `others`: the number of cached blocks at this position. `at`: the position at which the
        request's tokens first differ from the most similar block.
        """
        index, number = state.blocks.index, self.length
        parent = self._content[-1] if self._content else ROOT
        found = index.follows(parent)
        if not len(found):
            return {"kind": "nothing", "others": 0}
        equal = index.tokens_of(found) == self._windows[number]
        lengths = np.where(equal.all(axis=1), equal.shape[1], np.argmin(equal, axis=1))
        best = int(lengths.max())
        if best == equal.shape[1]:
            return {"kind": "media or salt", "others": len(found)}
        return {"kind": "tokens", "others": len(found), "at": number * state.block_size + best}


def _holder(state: State, block: int) -> str:
    """Return the running request whose block table contains the block, or ""."""
    for row in state.running.tolist():
        held = state.block_table[row, : state.num_blocks[row]]
        if block in held or block in state.windows.tables[:, row]:
            return state.requests_by_row[row].request.request_id
    return ""


def _cause(state: State, record: Record, lost: list[int]) -> tuple[str, str]:
    """Return why the record removed the blocks from the cache, and the request that got the blocks, or ""."""
    match record.event:
        case ev.Admitted(request_id=name):
            return "taken", name
        case ev.Scheduled():
            return "taken", next((name for block in lost if (name := _holder(state, block))), "")
        case ev.CacheReset():
            return "reset", ""
        case ev.Recovered():
            return "crash", ""
        case ev.Failed():
            return "failed", ""
    return "broken", getattr(record.event, "request_id", "")


def describe_miss(trail: PrefixTrail, state: State, number: int, name: str) -> tuple[str, dict[str, Any]]:
    """Return why block `number` of the request `name` was no prefix cache hit: as a text, and as a dict with
    the text's numbers.
    """
    loss = trail.losses.get(number)
    if loss is not None and loss.until >= 0:
        by = "this request" if loss.by == name else loss.by or "a request"
        how = {
            "taken": f"step {loss.until} took it for {loss.taken_by}{loss.note}",
            "reset": f"the cache was reset in step {loss.until}",
            "crash": f"the process ended at step {loss.until}",
            "failed": f"step {loss.until}, which was to fill it, failed",
        }.get(loss.why, f"its content was dropped in step {loss.until}")
        text = f"computed by {by} in step {loss.since}, but {how}"
        return text, {"miss": "lost", "loss": msgspec.to_builtins(loss)}
    found = trail.difference(state)
    if found["kind"] == "tokens":
        text = f"{found['others']} cached blocks follow the same prefix, but the closest differs at token "
        return f"{text}{found['at']}", {"miss": "tokens", "at": found["at"]}
    if found["kind"] == "media or salt":
        text = "a cached block has the same tokens, but other media or another tenant's salt"
        text += ", or another adapter" if state.config.max_loras else ""
        return text, {"miss": "media or salt"}
    return "never computed before", {"miss": "never there"}
