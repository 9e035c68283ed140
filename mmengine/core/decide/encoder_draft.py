"""Encoder work that one decision adds, tried in order: what is encoded, what leaves the cache, where a
chunk is cut."""

from typing import NamedTuple

from mmengine.core.state.reading import RequestView
from mmengine.core.state.view import View
from mmengine.events import vocabulary as ev
from mmengine.request import num_before


class Shortage(NamedTuple):
    """Why an item does not fit: `what` is "encoder budget" or "encoder cache", in embeddings; "encoder work",
    in units of it, or "encoder pieces", where that is more than a step may take."""

    what: str
    needed: int
    free: int


class EncoderDraft:
    """Encoder work that this decision adds: budget, cache room and evictions, tried in order.

    `patient`: with vLLM's decisions a row waits for the item that its drafter would read next.
    """

    def __init__(self, view: View, *, patient: bool = True):
        self._cache = view.encoder
        self._split_media = view.config.split_media
        self._ahead = int(bool(view.config.lookahead_tokens))  # a drafter reads one token ahead
        self._compat = view.config.compat == "vllm"
        self._waits = patient and self._compat and len(view.running) > 1
        # vLLM cuts right before the item, and drafts for its last token without what comes next.
        self._cut_ahead = 0 if self._compat else self._ahead
        self._left = view.encoder_left
        self._piece, self._work_left = view.config.encoder_piece, view.work_left
        self._added: dict[bytes, int] = {}
        self._keep: set[bytes] = set()
        self._looked_at: list[bytes] = []  # cached items, in the order of their first use
        self.encode: list[tuple[bytes, int, int]] = []
        self.evict: list[bytes] = []
        self.refused: dict[str, Shortage] = {}  # by request: the item that cut its chunk
        self.large: tuple[RequestView, int] | None = None  # the first of these that goes in pieces

    def cut(self, req_state: RequestView, row: int, start: int, length: int) -> int:
        """The chunk [start, start + length) of a request, cut before the first item that does not
        fit; what fits is added to the draft. Gives the length that is left."""
        if not length:
            return 0
        media, end = req_state.request.media, start + length + self._ahead
        for index in range(num_before(media, start), len(media)):
            item = media[index]
            if item.start >= end:
                break
            if not self._split_media and start + self._ahead < item.start and end < item.end:
                return item.start - start - self._ahead
            first = next((at for at, size in item.runs if at + size > start and at < end), None)
            if first is None:
                continue  # only the text between a video's runs
            if not self._take(req_state, row, index, item.num_embeds):
                return self._cut_before(first - start)
        return length

    def _cut_before(self, room: int) -> int:
        """Tokens of a chunk that ends before an item `room` tokens away. A drafter reads one token
        ahead; it goes without where waiting for that could last for ever."""
        if room > self._ahead:
            return room - self._cut_ahead
        return 0 if self._waits else max(0, room)

    def _take(self, req_state: RequestView, row: int, index: int, size: int) -> bool:
        key = req_state.media_keys[index]
        if index in req_state.held_media or key in self._added:
            return True
        if self._cache.has(key) and key not in self.evict:
            if key not in self._keep:
                self._keep.add(key)
                self._looked_at.append(key)
            return True
        if self._piece and not self._fits_step(req_state, index):
            return False
        if size > self._left:
            self.refused[req_state.request.request_id] = Shortage("encoder budget", size, self._left)
            return False
        room = sum(self._added.values()) - sum(map(self._cache.size_of, self.evict))
        keep = self._keep.union(self.evict)
        evicted = self._cache.evictions_for(size, keep, room)
        if evicted is None:
            free = self._cache.room(keep, room)
            self.refused[req_state.request.request_id] = Shortage("encoder cache", size, free)
            return False
        self.evict += evicted
        self._added[key] = size
        self._left -= size
        self._work_left -= req_state.media_work[index] if self._piece else 0
        self.encode.append((key, row, index))
        return True

    def _fits_step(self, req_state: RequestView, index: int) -> bool:
        work, name = req_state.media_work[index], req_state.request.request_id
        if work > self._piece:
            self.large = self.large or (req_state, index)
            self.refused[name] = Shortage("encoder pieces", work, self._piece)
        elif work > self._work_left:
            self.refused[name] = Shortage("encoder work", work, self._work_left)
        else:
            return True
        return False

    def left_behind(self, given_up: bool) -> ev.Evicted | None:
        """What asking changed though nothing of it runs: vLLM lets evictions stand, and what a request
        looked at before it was `given_up` counts as used."""
        if not self._compat:
            return None
        used = [key for key in self._looked_at if key in self._cache.idle] if given_up else []
        idle = [key for key in self._cache.idle if key not in self.evict]
        if used == idle[len(idle) - len(used) :]:
            used = []
        return ev.Evicted(tuple(self.evict), tuple(used)) if self.evict or used else None
