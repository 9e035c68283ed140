"""Loads and unloads the LoRA adapters that requests may name."""

from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from mmengine.checkpoint.peft import AdapterFiles
from mmengine.core.decide.request_checks import MAX_ID_CHARS
from mmengine.core.resume import ResumeState
from mmengine.errors import ConfigError, InvalidRequest, MMEngineError, ModelError
from mmengine.events import vocabulary as ev
from mmengine.models.loader import resolve_adapter
from mmengine.request import Adapter, check_unicode
from mmengine.serve.requests.operator_log import operator_log

if TYPE_CHECKING:  # importing mmengine.build imports torch
    from mmengine.build import Built

MAX_ADAPTERS = 1024  # maximum number of adapters that are loaded at the same time


@dataclass(frozen=True, slots=True)
class LocalAdapter:
    """An adapter and the folder with its weights."""

    adapter: Adapter
    folder: Path


@dataclass(slots=True)
class _Use:
    """The requests and names that use an adapter's weights. The newest name comes last."""

    requests: set[str] = field(default_factory=set)
    names: dict[str, LocalAdapter] = field(default_factory=dict)


class Adapters:
    """An engine's LoRA adapters. Only the engine's thread may change them; all threads may read them. As a
    RequestResource, an instance keeps a request's adapter until the request ends, even if the adapter is
    unloaded or replaced.
    """

    def __init__(self, built: "Built") -> None:
        self._built, self._config = built, built.config
        self.by_name: dict[str, LocalAdapter] = {}
        self._uses: dict[bytes, _Use] = {}
        self._of_request: dict[str, bytes] = {}

    def __iter__(self) -> Iterator[LocalAdapter]:
        return iter(tuple(self.by_name.values()))

    def read(self, name: str, source: str | Path) -> LocalAdapter:
        """Read and check the adapter in a folder or on the hub. Thread-safe.

        Raises ModelError, ConfigError, InvalidRequest.
        """
        if not isinstance(name, str) or not 1 <= len(name) <= MAX_ID_CHARS or not name.isprintable():
            raise InvalidRequest(f"the name of an adapter must have 1 to {MAX_ID_CHARS} printable characters")
        if not self._config.max_loras:
            raise ConfigError(
                "this engine has no room for adapters: set max_loras, or start the engine with an adapter"
            )
        folder = resolve_adapter(source)
        check_unicode(("lora_path",), str(folder))  # the path is written to the log
        files = self._read(folder)
        size = files.num_bytes(self._value_bytes)
        return LocalAdapter(Adapter(files.digest, size, files.is_visual, name), folder)

    def _read(self, folder: Path) -> AdapterFiles:
        read = getattr(self._built.plugin, "read_adapter", None)
        if read is None:
            raise ModelError("this model family does not support adapters")
        limits = self._config.lora_bytes, self._value_bytes
        files: AdapterFiles = read(self._built.folder, folder, *limits)
        return files

    @property
    def _value_bytes(self) -> int:
        return 4 if self._built.dtype == "float32" else 2

    def load(self, known: LocalAdapter) -> None:
        """Make the adapter available to requests. Replaces an adapter with the same name.

        Raises InvalidRequest if MAX_ADAPTERS are loaded.
        """
        name, digest = known.adapter.name, known.adapter.digest
        if name not in self.by_name and len(self.by_name) >= MAX_ADAPTERS:
            raise InvalidRequest(f"{MAX_ADAPTERS} adapters are loaded, which is the limit: unload one")
        before = self.by_name.get(name)
        self._name(known)
        if before == known:
            return
        if before is not None and before.adapter.digest != digest:
            self._drop_name(before)
        self._built.core.inbox.put(ev.AdapterLoaded(known.adapter, str(known.folder)))
        operator_log.info("adapter loaded", name=name, digest=digest.hex()[:12], folder=str(known.folder))

    def unload(self, name: str) -> None:
        """Unload the adapter for new requests. Running requests continue to use it.

        Raises InvalidRequest for an unknown adapter.
        """
        known = self.by_name.pop(name, None)
        if known is None:
            raise InvalidRequest(f"no adapter {name!r:.80} is loaded")
        self._built.core.inbox.put(ev.AdapterUnloaded(name))
        self._drop_name(known)
        operator_log.info("adapter unloaded", name=name)

    def named(self, name: str) -> Adapter | None:
        """Return the adapter with this name, or None if the name is "".

        Raises InvalidRequest for an unknown name.
        """
        if not name:
            return None
        known = self.by_name.get(name)
        if known is None:
            raise InvalidRequest(f"no adapter {name!r:.80} is loaded; load it, or leave it out")
        return known.adapter

    def hold(self, request_id: str, adapter: Adapter) -> None:
        self._of_request[request_id] = adapter.digest
        self._use(adapter.digest).requests.add(request_id)

    def release(self, request_id: str, /) -> None:
        digest = self._of_request.pop(request_id, None)
        if digest is not None:
            self._use(digest).requests.discard(request_id)
            self._forget_unused(digest)

    def recover(self, resumed: ResumeState, coming: Iterable[LocalAdapter] = ()) -> list[tuple[str, str]]:
        """Load a resumed log's adapters again. An adapter that a request in the log uses is kept until the
        request ends.

        `coming`: adapters that the caller loads next. Returns (request id, reason) for each request whose
        adapter is missing.
        """
        pool, lost = resumed.state.adapters, []
        sources = {
            each.adapter.digest: each.source for each in (*pool.nameless.values(), *pool.known.values())
        }
        found = {known.adapter.digest: known for known in coming}
        found |= {known.adapter.digest: known for known in map(self._found, pool.nameless.values()) if known}
        for known in map(self._found, pool.known.values()):
            if known is not None:
                self._name(known)
        for name, req_state in resumed.state.requests.items():
            adapter = req_state.request.adapter
            if adapter is None:
                continue
            if adapter.digest not in self._uses and adapter.digest in found:
                self._note(found[adapter.digest])
            if adapter.digest in self._uses:
                self.hold(name, adapter)
            else:
                where = sources.get(adapter.digest) or "no folder"
                lost.append((name, f"its adapter {adapter.name!r} is missing ({where})"))
        return lost

    def _found(self, loaded: ev.AdapterLoaded) -> LocalAdapter | None:
        """Read an adapter again from the folder that the log records.

        Returns None if the folder is missing or the weights have changed.
        """
        with suppress(MMEngineError, OSError):
            known = self.read(loaded.adapter.name, Path(loaded.source))
            if known.adapter.digest == loaded.adapter.digest:
                return known
        return None

    def _name(self, known: LocalAdapter) -> None:
        names = self._use(known.adapter.digest).names
        names.pop(known.adapter.name, None)
        names[known.adapter.name] = self.by_name[known.adapter.name] = known
        self._note(known)

    def _note(self, known: LocalAdapter) -> None:
        """Tell the executor the folder with the adapter's weights."""
        self._use(known.adapter.digest)
        self._built.executor.know_adapter(known.adapter.digest, partial(self._read, known.folder))

    def _use(self, digest: bytes) -> _Use:
        return self._uses.setdefault(digest, _Use())

    def _drop_name(self, known: LocalAdapter) -> None:
        names = self._use(known.adapter.digest).names
        del names[known.adapter.name]
        if names:  # the executor must not read the dropped name's folder, which may be deleted
            self._note(next(reversed(names.values())))
        self._forget_unused(known.adapter.digest)

    def _forget_unused(self, digest: bytes) -> None:
        use = self._uses[digest]
        if not use.requests and not use.names:
            del self._uses[digest]
            self._built.executor.forget_adapter(digest)
