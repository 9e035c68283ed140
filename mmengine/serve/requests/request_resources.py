"""Requests' resources: each is held from a request's submission to its end."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

from mmengine.errors import id_in_use
from mmengine.models.plugin import MediaInput
from mmengine.request import Request
from mmengine.serve.prompt.media_memory import MediaMemory
from mmengine.serve.requests.grammar_memory import GrammarMemory
from mmengine.serve.requests.media_store import MediaStore
from mmengine.serve.requests.metrics import Metrics

if TYPE_CHECKING:  # importing mmengine.build imports torch
    from mmengine.build import Built


class RequestResource(Protocol):
    """Holds something for requests, by their core ids."""

    def release(self, request_id: str, /) -> None:
        """Release the resources that an ended request holds. An unknown id is no error."""


class RequestResources:
    """All an engine's resources; each is released for every request that ends, however it ends.

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
        """Hold a request's pixels for the device and in the media store, and compile its grammar.

        Raises InvalidRequest for an id in use, and QueueFull and other errors if a resource has no room; then
        nothing is held. For a session's request, `new` are the media that it brings; the session holds the
        others.
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
        """Release everything that the request holds."""
        self._ids.discard(request_id)
        for holder in self._all:
            holder.release(request_id)
