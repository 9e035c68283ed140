"""Holds the LoRA adapters that are loaded on the device, and records which adapter each row uses.

An adapter is read from its files when a row first needs it. Each step's plan says which adapters may stay on
the device. If the files have changed since the adapter was registered, reading fails, because requests name
an adapter by the digest of its content.
"""

from collections.abc import Callable, Iterator, Sequence

import numpy as np

from mmengine.checkpoint.peft import AdapterFiles
from mmengine.core.executor import Admission, EncodeItem, StepPlan
from mmengine.core.state.adapters import digest_of
from mmengine.errors import ExecutorFailed, ModelError
from mmengine.models.lora.adapter import AdapterRows, LoadedAdapter
from mmengine.models.plugin import VisionLanguageModel
from mmengine.request import Request

NONE = -1  # adapter number if a row uses no adapter
ReadAdapter = Callable[[], AdapterFiles]


class AdapterStore:
    """The adapters of one model. `register` sets the function that reads an adapter; `forget` removes the
    function.
    """

    def __init__(self, model: VisionLanguageModel, max_rows: int) -> None:
        self._make: Callable[[AdapterFiles], LoadedAdapter] | None = getattr(model, "adapter", None)
        self._sources: dict[bytes, ReadAdapter] = {}
        self._numbers: dict[bytes, int] = {}  # digest -> number, for each adapter that any row has used
        self._digests: list[bytes] = []  # the digests by number
        self._loaded: dict[bytes, LoadedAdapter] = {}
        self._of_row = np.full(max_rows, NONE, np.int32)

    def register(self, digest: bytes, read: ReadAdapter) -> None:
        self._sources[digest] = read

    def forget(self, digest: bytes) -> None:
        self._sources.pop(digest, None)

    def admit(self, admission: Admission) -> None:
        digest = digest_of(admission.request.adapter)
        if digest and digest not in self._numbers:
            self._numbers[digest] = len(self._digests)
            self._digests.append(digest)
        self._of_row[admission.row] = self._numbers[digest] if digest else NONE

    def keep_only(self, digests: Sequence[bytes]) -> None:
        """Remove all adapters except `digests` from the device."""
        for digest in self._loaded.keys() - set(digests):
            del self._loaded[digest]

    def rows_of(self, plan: StepPlan) -> tuple[AdapterRows, ...]:
        """Return each adapter in the step, with the batch indices of the tokens that use the adapter. Missing
        adapters are loaded.

        Raises ExecutorFailed for an adapter that cannot be read any more.
        """
        numbers = self._of_row[plan.rows]
        found = np.unique(numbers[numbers != NONE]).tolist()
        if not found:
            return ()
        of_token = np.repeat(numbers, plan.num_scheduled)
        return tuple(
            AdapterRows(self._get(self._digests[number]), np.flatnonzero(of_token == number).astype(np.int32))
            for number in found
        )

    def of_media(self, request: Request) -> LoadedAdapter | None:
        """Return the adapter with which the encoder encodes the media of `request`, or None.

        Raises ExecutorFailed for an adapter that cannot be read any more.
        """
        digest = request.visual_adapter
        return self._get(digest) if digest else None

    def groups(self, items: Sequence[EncodeItem]) -> Iterator[tuple[LoadedAdapter | None, list[EncodeItem]]]:
        """Yield (adapter, items) for each adapter that encodes some of `items`; None stands for no adapter.
        The pairs are in the order of their first items.
        """
        by_digest: dict[bytes, list[EncodeItem]] = {}
        for item in items:
            by_digest.setdefault(item.request.visual_adapter, []).append(item)
        for own in by_digest.values():
            yield self.of_media(own[0].request), own

    def _get(self, digest: bytes) -> LoadedAdapter:
        loaded = self._loaded.get(digest)
        if loaded is None:
            loaded = self._loaded[digest] = self._load(digest)
        return loaded

    def _load(self, digest: bytes) -> LoadedAdapter:
        read = self._sources.get(digest)
        if read is None or self._make is None:
            raise ExecutorFailed(f"the adapter {digest.hex()[:12]} is not loaded; load it again")
        try:
            files = read()
        except ModelError as error:
            raise ExecutorFailed(f"the adapter {digest.hex()[:12]} can no longer be read: {error}") from None
        if files.digest != digest:
            raise ExecutorFailed(
                f"the adapter in {files.folder} has changed since it was loaded; load it again"
            )
        return self._make(files)

    def clear(self) -> None:
        self._loaded.clear()
