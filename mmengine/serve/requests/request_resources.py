"""Holds a request's resources from submission to the request's end, and limits the memory for grammars."""

import sys
import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

import msgspec

from mmengine.errors import QueueFull, id_in_use
from mmengine.models.plugin import MediaInput
from mmengine.request import GrammarRequest, Request
from mmengine.serve.prompt.media_memory import MediaMemory
from mmengine.serve.requests.media_store import MediaStore
from mmengine.serve.requests.metrics import Metrics

if TYPE_CHECKING:  # importing mmengine.build imports torch
    from mmengine.build import Built


# Maximum total size of the different grammar source texts in bytes. Each text has at most 8 MiB.
MAX_BYTES = 128 * 2**20


class GrammarMemory:
    """Keeps the source texts for requests' grammars. Equal sources are shared and counted once.

    Thread-safe.
    """

    def __init__(self, max_bytes: int = MAX_BYTES) -> None:
        self.max_bytes = max_bytes
        self._lock = threading.Lock()
        self._held: dict[object, str] = {}  # holder -> source
        self._known: dict[str, list] = {}  # source -> [the shared object, its number of holders]
        self.num_bytes = 0

    def hold(self, holder: object, grammar: GrammarRequest, *, was_accepted: bool = False) -> GrammarRequest:
        """Return `grammar` with a shared source object, which is kept until `release`.

        A holder, such as a request id, may hold only a single source. Raises QueueFull if a new source would
        exceed `max_bytes`. The limit does not apply to a request that a previous process accepted
        (`was_accepted`).
        """
        source = grammar.source
        with self._lock:
            size = sys.getsizeof(source)
            known = self._known.get(source)
            if known is None:
                if self.num_bytes + size > self.max_bytes and not was_accepted:
                    raise QueueFull(
                        f"the grammars of {len(self._held)} requests take {self.num_bytes:,} of "
                        f"{self.max_bytes:,} bytes, and this request's grammar needs {size:,} more: try "
                        "again later"
                    )
                known = self._known[source] = [source, 0]
                self.num_bytes += size
            known[1] += 1
            self._held[holder] = known[0]
            return _with_source(grammar, known[0])

    def shared(self, grammar: GrammarRequest) -> GrammarRequest:
        """Return `grammar` with the shared object for an equal source.

        If no holder has an equal source, returns `grammar` unchanged.
        """
        with self._lock:
            known = self._known.get(grammar.source)
            return grammar if known is None else _with_source(grammar, known[0])

    def release(self, holder: object) -> None:
        """Release the holder's source. A holder without a source is no error."""
        with self._lock:
            source = self._held.pop(holder, None)
            if source is None:
                return
            known = self._known[source]
            known[1] -= 1
            if not known[1]:
                del self._known[source]
                self.num_bytes -= sys.getsizeof(source)


def _with_source(grammar: GrammarRequest, source: str) -> GrammarRequest:
    return grammar if grammar.source is source else msgspec.structs.replace(grammar, source=source)


class RequestResource(Protocol):
    """An object that holds resources for requests, by the engine core's request ids. In the engine core, each
    choice has its own request id.
    """

    def release(self, request_id: str, /) -> None:
        """Release the resources that an ended request holds. An unknown id is no error."""


class RequestResources:
    """Holds all resources for a request, and releases them when the request ends for any reason.

    Not thread-safe.
    """

    def __init__(
        self,
        built: "Built",
        media_memory: MediaMemory,
        grammar_memory: GrammarMemory,
        metrics: Metrics,
        store: MediaStore | None,
    ):
        self._executor, self._grammars, self._store = built.executor, built.grammars, store
        self._media_memory, self._grammar_memory = media_memory, grammar_memory
        self._max_model_len = built.config.max_model_len
        self._ids = set(built.resumed.state.requests if built.resumed is not None else ())
        self._all: list[RequestResource] = [self._executor, self._grammars]
        self._all += [grammar_memory, media_memory, metrics]
        self._all += [store] if store is not None else []

    def add(self, holder: RequestResource) -> None:
        self._all.append(holder)

    def hold(
        self, request: Request, media: Sequence[MediaInput], new: Sequence[MediaInput] | None = None
    ) -> None:
        """Pass a request's pixels to the executor, store its media, and start compiling its grammar.

        Raises InvalidRequest for an id in use, and QueueFull or another error if a resource's limit is
        reached. After an error, nothing from this call stays held. For a session's request, `new` has the
        media that the request adds; the session holds all other media.
        """
        request_id = request.request_id
        if request_id in self._ids:
            raise id_in_use(request_id)
        self._ids.add(request_id)
        try:
            self._executor.attach(request_id, media)
            self._media_memory.hold(request_id, media if new is None else new)
            if self._store is not None and new is None:
                self._store.hold(request_id, media)
            if request.grammar is not None:
                grammar = self._grammar_memory.hold(request_id, request.grammar)
                self._grammars.hold(
                    request_id, grammar, request.budget(self._max_model_len), request.stop_reserve
                )
        except BaseException:
            self.release(request_id)
            raise

    def release(self, request_id: str) -> None:
        """Release all resources that the request holds."""
        self._ids.discard(request_id)
        for holder in self._all:
            holder.release(request_id)
