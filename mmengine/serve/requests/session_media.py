"""Keeps sessions' images and frames, which are encoded again when a session's prompt is recomputed.

With a media store, the media are in files beside the log. Without a store, the compressed bytes stay in
memory, or the pixels if the caller passed pixels. If a request drops media, they are kept until the session's
next request, because the dropping request may fail.
"""

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import overload

from mmengine.core.state.sessions import SessionState
from mmengine.errors import InvalidMedia, QueueFull
from mmengine.models.plugin import MediaInput, MediaSource, Processor
from mmengine.processing.workers.attempt import Attempt
from mmengine.request import MediaItem
from mmengine.serve.requests.media_store import MediaStore

Load = Callable[[], MediaInput]
_Kept = MediaSource | MediaInput


class SessionMedia:
    """All sessions' media, with at most `max_bytes` in memory. Not thread-safe."""

    def __init__(self, store: MediaStore | None, processor: Processor, max_bytes: int):
        self._store, self._processor, self._max_bytes = store, processor, max_bytes
        self._kept: dict[str, dict[bytes, _Kept]] = {}  # session id -> mm_hash -> media; empty with a store
        self.num_bytes = 0

    def take(self, session: SessionState, items: Sequence[MediaItem], new: Sequence[MediaInput]) -> None:
        """Keep the session's media and the request's `items`. `new` has the data for media that the request
        adds.

        Raises InvalidMedia if an older item is lost, and QueueFull if there is no room.
        """
        wanted = (*session.media, *items)
        if self._store is not None:
            self._store.keep(holder_of(session.session_id), wanted, new)
            return
        kept = dict(self._kept.get(session.session_id, {}))
        for one in new:
            kept.setdefault(one.item.mm_hash, one if one.source is None else one.source)
        hashes = {item.mm_hash for item in wanted}
        if missing := hashes - kept.keys():
            raise InvalidMedia(
                f"{len(missing)} images or frames of the session are lost with the process that ended, "
                "because media_store_bytes is 0, so that no media are kept beside the log; open another "
                "session"
            )
        kept = {mm_hash: one for mm_hash, one in kept.items() if mm_hash in hashes}
        num_bytes = self.num_bytes + _bytes_of(kept) - _bytes_of(self._kept.get(session.session_id, {}))
        if num_bytes > self._max_bytes:
            raise QueueFull(
                f"sessions keep {self.num_bytes} of {self._max_bytes} bytes of images and frames "
                "(session_media_bytes) and have no room for more; close a session, or give the engine a log, "
                "so that media are kept on the disk"
            )
        self._kept[session.session_id], self.num_bytes = kept, num_bytes

    def drop(self, session_id: str) -> None:
        """Release a closed session's media. An unknown id is no error."""
        self.num_bytes -= _bytes_of(self._kept.pop(session_id, {}))
        if self._store is not None:
            self._store.release(holder_of(session_id))

    def inputs(
        self, session_id: str, items: Sequence[MediaItem], there: Sequence[MediaInput]
    ) -> Sequence[MediaInput]:
        """Return a request's pixels as a lazy sequence.

        An item that is not in `there` is loaded when a step reads its pixels. This load does not wait for
        busy decoder processes, because the wait would delay the step.
        """
        fresh = {one.item.mm_hash: one for one in there}
        kept = self._kept.get(session_id, {})

        def load(item: MediaItem) -> MediaInput:
            one = fresh.get(item.mm_hash) or kept.get(item.mm_hash)
            if isinstance(one, MediaInput):
                return MediaInput(item, one.patches, one.source)
            with Attempt(None, waits=False).on_this_thread():
                if one is not None:
                    return self._processor.restore(item, one)
                assert self._store is not None
                return self._store.load(item, self._processor)

        return _Inputs(items, load)

    def loads(self, session_id: str, items: Iterable[MediaItem]) -> list[Load]:
        """Return a loader for each item that must be decoded. Any thread may call the loaders.

        Raises InvalidMedia, QueueFull.
        """
        if self._store is not None:
            return [partial(self._store.load, item, self._processor) for item in items]
        kept = self._kept.get(session_id, {})
        found = ((item, kept.get(item.mm_hash)) for item in items)
        sources = [(item, one) for item, one in found if isinstance(one, MediaSource)]
        return [partial(self._processor.restore, *each) for each in sources]


class _Inputs(Sequence[MediaInput]):
    def __init__(self, items: Sequence[MediaItem], load: Callable[[MediaItem], MediaInput]):
        self._items, self._load = items, load

    def __len__(self) -> int:
        return len(self._items)

    @overload
    def __getitem__(self, index: int) -> MediaInput: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[MediaInput]: ...
    def __getitem__(self, index: int | slice) -> MediaInput | Sequence[MediaInput]:
        if isinstance(index, slice):
            return _Inputs(self._items[index], self._load)
        return self._load(self._items[index])


def holder_of(session_id: str) -> str:
    """Return the name under which a session holds media in the store. No request id equals this name."""
    return f"\0session {session_id}"


def _bytes_of(kept: dict[bytes, _Kept]) -> int:
    return sum(_size(one) for one in kept.values())


def _size(one: _Kept) -> int:
    if isinstance(one, MediaInput):
        return one.patches.nbytes
    return len(one.data) if isinstance(one.data, bytes) else 0
