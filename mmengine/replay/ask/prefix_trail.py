"""What became of a prefix in the cache: who computed it, when it was lost, and to whom."""

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
    """When a block of the prefix was there and when it went: `since` and `by` (the step and the request
    that computed it), `until` (the step that took it, -1 while it is there), `why`, and for whom."""

    since: int
    by: str
    until: int = -1
    why: str = ""
    taken_by: str = ""


class PrefixTrail:
    """Follows the blocks that the beginning of a request would hit, from the log's first record on: feed
    it every record, `before` and `after` it was applied. `tokens`: int32 [n], those the request is
    admitted with. `ahead`: the log's constant `media_ahead`. `by`: who computed what is there when the trail
    begins."""

    def __init__(self, state: State, request: Request, tokens: np.ndarray, ahead: int, by: str = ""):
        size, width = state.block_size, state.content_width
        self.num_blocks = (len(tokens) - 1) // size
        self._windows = content_windows(tokens, 0, self.num_blocks, size, width)
        self._parts = state.blocks.index.token_parts(self._windows).tolist()
        self._extras = block_extras(request, 0, self.num_blocks, size, ahead)
        self._by = by
        self._blocks: list[int] = []  # that hold the prefix now
        self._content: list[int] = []
        self.losses: dict[int, Loss] = {}  # by number of the block: where it is, or how it was lost last

    @property
    def length(self) -> int:
        """Blocks of the prefix that are in the cache now."""
        return len(self._blocks)

    def after(self, state: State, record: Record) -> None:
        """The record was applied: shorten or lengthen what is there."""
        index = state.blocks.index
        if self._blocks:
            same = index.content[self._blocks] == self._content
            if not same.all():
                self._cut(state, record, int(np.argmin(same)))
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

    def _cut(self, state: State, record: Record, length: int) -> None:
        why, taken_by = _cause(state, record, self._blocks[length:])
        lost = range(length, self.length)
        del self._blocks[length:], self._content[length:]
        for number in lost:
            old = self.losses[number]
            self.losses[number] = Loss(old.since, old.by, record.step, why, taken_by)

    def difference(self, state: State) -> dict[str, Any]:
        """Why the block behind the cached ones is none, as far as the cache now shows it: what follows the
        same beginning there. `at`: the first token that differs from the closest of them, counted in the
        request; `others`: how many blocks follow; `kind`: "tokens", "media or salt", or "nothing"."""
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
    """Who computes a block that was just filled."""
    for row in state.running.tolist():
        if block in state.block_table[row, : state.num_blocks[row]]:
            return state.requests_by_row[row].request.request_id
    return ""


def _cause(state: State, record: Record, lost: list[int]) -> tuple[str, str]:
    """What the record did to the blocks, and for whom."""
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
