"""Encodes media, stores the encoder outputs (features) on the device, and writes them into a step's
embeddings.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import numpy as np
import torch

from mmengine.core.executor import EncodeItem, MediaSpan
from mmengine.errors import ConfigError, ExecutorFailed
from mmengine.models.lora.adapter import LoadedAdapter
from mmengine.models.plugin import MediaInput, VisionLanguageModel
from mmengine.runtime.device.upload import upload, upload_joined
from mmengine.runtime.graphs.encoder import EncoderGraphs


class ExternalFeatures(Protocol):
    """A store of encoder outputs outside of this engine, such as a shared block store."""

    def fetched_features(self, key: bytes) -> torch.Tensor | None:
        """Return the stored features [embeddings, width] of an item that is about to be encoded, or None."""

    def store_features(self, key: bytes, features: torch.Tensor) -> None:
        """Store the computed features of an item."""


class FeatureStore:
    """The features of media items, by encoder key. A tensor [slots, (1 + num_deepstack) * hidden_size] stores
    an embedding in each slot. An embedding's first hidden_size values replace the placeholder in the model's
    input. The other values are added to the hidden states after the first num_deepstack layers. The scheduler
    decides which features are stored, up to `capacity` embeddings. The tensor grows by doubling if `hold_all`
    was not called. Slots of dropped features are reused.
    """

    def __init__(self, hidden_size: int, num_deepstack: int, capacity: int) -> None:
        self._hidden_size = hidden_size
        self._num_deepstack = num_deepstack
        self._capacity = capacity
        self._cache = torch.empty(0, 0)
        self._places: dict[bytes, np.ndarray] = {}  # key -> slots of the item's embeddings, int64
        self._free = np.empty(0, np.int64)  # the first `_num_free` elements are free slots
        self._num_free = 0

    def __len__(self) -> int:
        return len(self._places)

    def hold_all(self, dtype: torch.dtype, device: torch.device) -> None:
        """Allocate the whole tensor now. Raises ConfigError if the memory is too small. A GPU engine reserves
        memory for exactly this tensor, but a growing tensor would need 50 % more during the copy.
        """
        width = (1 + self._num_deepstack) * self._hidden_size
        try:
            self._move_to(torch.empty(self._capacity, width, dtype=dtype, device=device))
        except torch.OutOfMemoryError as error:
            raise ConfigError(
                f"the encoder cache of {self._capacity} embeddings needs "
                f"{self._capacity * width * dtype.itemsize / 2**30:.2f} GiB on {device}, which cannot be "
                "allocated; lower encoder_cache_size"
            ) from error

    def put(self, keys: Sequence[bytes], sizes: Sequence[int], features: torch.Tensor) -> None:
        """Store the features of several items, [sum of sizes, (1 + num_deepstack) * hidden_size], in the
        order of `keys`.

        Raises ExecutorFailed if the features exceed the capacity.
        """
        for key in keys:
            self.drop(key)
        self._reserve(features)
        stop = self._num_free
        self._num_free -= len(features)
        places = self._free[self._num_free : stop].copy()
        self._cache.index_copy_(0, upload(places, features.device), features)
        ends = np.cumsum(sizes)
        for key, start, end in zip(keys, ends - sizes, ends, strict=True):
            self._places[key] = places[start:end]

    def drop(self, key: bytes) -> None:
        """Drop the features of `key`. An unknown key is ignored, because the encoding of the item may have
        failed.
        """
        places = self._places.pop(key, None)
        if places is not None:
            self._free[self._num_free : self._num_free + len(places)] = places
            self._num_free += len(places)

    def copy_of(self, key: bytes) -> torch.Tensor:
        """Return a copy of the features of `key`, [embeddings, width]."""
        return self._cache.index_select(0, upload(self._places[key], self._cache.device))

    def clear(self) -> None:
        self._places.clear()
        self._cache, self._free, self._num_free = torch.empty(0, 0), self._free[:0], 0

    def _reserve(self, features: torch.Tensor) -> None:
        """Grow the tensor if there are too few free slots for `features`. The first features determine the
        tensor's dtype and device.
        """
        num_places = len(self._cache)
        missing = len(features) - self._num_free
        if missing <= 0:
            return
        size = min(max(num_places + missing, 2 * num_places), self._capacity)
        if size < num_places + missing:
            raise ExecutorFailed(
                f"{len(features)} embeddings do not fit into the encoder cache of {self._capacity}: "
                f"{num_places - self._num_free} are in use"
            )
        self._move_to(features.new_empty(size, features.shape[1]))

    def _move_to(self, cache: torch.Tensor) -> None:
        """Replace the tensor by the larger tensor `cache`, and copy the stored features."""
        num_places, size = len(self._cache), len(cache)
        if num_places:
            cache[:num_places] = self._cache
        self._cache = cache
        free = np.empty(size, np.int64)
        free[: size - num_places] = np.arange(size - 1, num_places - 1, -1)
        free[size - num_places : size - num_places + self._num_free] = self._free[: self._num_free]
        self._free, self._num_free = free, size - num_places + self._num_free

    def place(self, spans: Sequence[MediaSpan], embeds: torch.Tensor) -> torch.Tensor | None:
        """Write the features of all spans into `embeds` [t, hidden_size]. Returns the deepstack features
        [num_deepstack, t, hidden_size], with zeros at text tokens, or None without spans or deepstack. Raises
        ExecutorFailed if features are missing.
        """
        if not spans:
            return None
        hidden, count = self._hidden_size, sum(span.length for span in spans)
        index = np.empty((2, count), np.int64)  # slots of the embeddings, positions in the step
        at = 0
        for span in spans:
            index[0, at : at + span.length] = self._places_of(span)
            index[1, at : at + span.length] = np.arange(span.start, span.start + span.length)
            at += span.length
        places, tokens = upload(index, embeds.device)
        features = self._cache.index_select(0, places)
        embeds.index_copy_(0, tokens, features[:, :hidden])
        if not self._num_deepstack:
            return None
        deepstack = embeds.new_zeros(self._num_deepstack, embeds.shape[0], hidden)
        layers = features[:, hidden:].view(count, self._num_deepstack, hidden).transpose(0, 1)
        return deepstack.index_copy_(1, tokens, layers)

    def _places_of(self, span: MediaSpan) -> np.ndarray:
        """Return the slots with the embeddings of `span`."""
        places = self._places.get(span.key)
        if places is None or span.item_start + span.length > len(places):
            raise ExecutorFailed(
                f"tokens {span.start} to {span.start + span.length} of the batch need features of media "
                f"item {span.key.hex()[:12]} which are not on the device"
            )
        return places[span.item_start : span.item_start + span.length]


def encode(
    model: VisionLanguageModel,
    items: Sequence[EncodeItem],
    payloads: Mapping[str, Sequence[MediaInput]],
    store: FeatureStore,
    device: torch.device,
    *,
    graphs: EncoderGraphs | None = None,
    share: Callable[[torch.Tensor], torch.Tensor] | None = None,
    alone: bool = False,
    last: torch.Tensor | None = None,
    external: ExternalFeatures | None = None,
    adapter: LoadedAdapter | None = None,
) -> None:
    """Encode `items` in a single packed call, and put their features into `store`.

    `payloads`: media by request id. `graphs`: captured encoder graphs, used if a captured size fits. `share`:
    a function that is applied to the features before they are stored. `alone`: encode each item in a separate
    call, for batch-invariant features. `last`: the last item's features, if the item was already encoded in
    parts. `external`: a store that supplies some items' features, and receives all other features. `adapter`:
    the LoRA adapter for all items. Raises ExecutorFailed if an item's pixels are missing, or if the model
    returns a wrong number of embeddings.
    """
    if external is not None:
        items = _not_external(items, store, external, last)
        if not items:
            return
    if alone and len(items) > 1:
        for item in items:
            own = last if item is items[-1] else None
            encode(
                model, [item], payloads, store, device, graphs=graphs, share=share, last=own, adapter=adapter
            )
            if external is not None:
                external.store_features(item.key, store.copy_of(item.key))
        return
    media = [payload_of(item, payloads) for item in (items if last is None else items[:-1])]
    patches, grids = [one.patches for one in media], [one.item.grid for one in media]
    features = graphs.encode(patches, grids) if graphs is not None and media else None
    if features is None and media:
        asked = () if adapter is None else (adapter,)
        forward: Callable[..., torch.Tensor] = model.encode
        features = forward(upload_joined(patches, device), grids, *asked)
    if last is not None:
        features = last if features is None else torch.cat((features, last))
    assert features is not None
    sizes = [item.request.media[item.index].num_embeds for item in items]
    if features.shape[0] != sum(sizes):
        raise ExecutorFailed(
            f"the encoder gave {features.shape[0]} embeddings for media items with {sum(sizes)} placeholders"
        )
    store.put([item.key for item in items], sizes, features if share is None else share(features))
    if external is not None:
        for item in items:
            external.store_features(item.key, store.copy_of(item.key))


def _not_external(
    items: Sequence[EncodeItem], store: FeatureStore, external: ExternalFeatures, last: torch.Tensor | None
) -> list[EncodeItem]:
    """Copy features from `external` to `store`, and return the items without features in `external`. With
    `last`, the last item is always returned, because its features are in `last`.
    """
    left = []
    for item in items:
        own = last is not None and item is items[-1]
        came = None if own else external.fetched_features(item.key)
        if came is None or len(came) != item.request.media[item.index].num_embeds:
            left.append(item)
        else:
            store.put([item.key], [len(came)], came)
    return left


def payload_of(item: EncodeItem, payloads: Mapping[str, Sequence[MediaInput]]) -> MediaInput:
    """Return the pixels of an item. Raises ExecutorFailed if they are missing."""
    media = payloads.get(item.request.request_id, ())
    if item.index >= len(media):
        raise ExecutorFailed(
            f"media item {item.index} of request {item.request.request_id} cannot be encoded: its pixels "
            "were not attached"
        )
    return media[item.index]
