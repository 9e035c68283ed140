"""Plans a decision's encoder work: items to encode, outputs to evict, and the lengths of cut chunks."""

from typing import NamedTuple

from mmengine.core.state.read_only import RequestView
from mmengine.core.state.view import View
from mmengine.events import vocabulary as ev
from mmengine.request import MediaItem, num_before


class Shortage(NamedTuple):
    """The reason why a media item does not fit into a step.

    `what` is the limit. "encoder budget" and "encoder cache" count embeddings. "encoder work" and "encoder
    pieces" count the units of encoder_cache/work.py. With "encoder pieces", the item needs several steps.
    `needed`: the item's size. `free`: the size that would fit.
    """

    what: str
    needed: int
    free: int


class EncoderDraft:
    """The encoder work that one decision adds to a step.

    Items are added in order while they fit the encoder's budget and cache. Planned evictions count as free
    space. A subclass may override `would_split`, `cut_before` and `left_behind`.
    """

    def __init__(self, view: View):
        self._cache = view.encoder
        self._split_media = view.config.split_media
        self._ahead = int(bool(view.config.lookahead_tokens))  # a drafter reads one token ahead
        self._left = view.encoder_left
        self._piece, self._work_left = view.config.encoder_piece, view.work_left
        self._added: dict[bytes, int] = {}  # key -> number of embeddings, for each item to encode
        self._keep: set[bytes] = set()  # cached items that this decision needs
        self._looked_up: list[bytes] = []  # cached items, in the order of their first use
        self.encode: list[tuple[bytes, int, int]] = []
        self.evict: list[bytes] = []
        self.refused: dict[str, Shortage] = {}  # request id -> reason why the request's chunk was cut
        self.large: tuple[RequestView, int] | None = None  # the first refused item that needs several steps

    def cut(self, req_state: RequestView, row: int, start: int, length: int) -> int:
        """Cut the chunk [start, start + length) before the first item that does not fit, and return the new
        length. Items that fit are added to the plan.
        """
        if not length:
            return 0
        media, end = req_state.request.media, start + length + self._ahead
        for index in range(num_before(media, start), len(media)):
            item = media[index]
            if item.start >= end:
                break
            if not self._split_media and self.would_split(item, start, end):
                return max(0, item.start - start - self._ahead)
            first = next((at for at, size in item.runs if at + size > start and at < end), None)
            if first is None:
                continue  # the chunk contains only text between two runs of the item
            if not self._take(req_state, row, index, item.num_embeds):
                return self.cut_before(first - start)
        return length

    # Rules that a subclass may override

    def would_split(self, item: MediaItem, start: int, end: int) -> bool:
        """Return whether the chunk must end before `item`. Called only if media must not be split. `end`: the
        chunk's end, plus the tokens that a drafter reads ahead.
        """
        return start + self._ahead < item.start and end < item.end

    def cut_before(self, distance: int) -> int:
        """Return the length of a chunk that is cut before an item. `distance`: number of tokens from the
        chunk's start to the item.

        A drafter reads one token ahead, so the chunk ends one token earlier. A chunk with one token is not
        shortened, because a row with an empty chunk could wait forever. The drafter then lacks the next
        token.
        """
        return distance - self._ahead if distance > self._ahead else max(0, distance)

    def left_behind(self, given_up: bool) -> ev.Evicted | None:
        """Return the EVICTED event if the encoder cache must change although the request's chunk does not
        run. Otherwise return None. Only vLLM's rules require such a change. `given_up`: whether the request
        was examined and cannot run in this step.
        """
        return None

    def _take(self, req_state: RequestView, row: int, index: int, size: int) -> bool:
        key = req_state.media_keys[index]
        if index in req_state.held_media or key in self._added:
            return True
        if self._cache.has(key) and key not in self.evict:
            if key not in self._keep:
                self._keep.add(key)
                self._looked_up.append(key)
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
