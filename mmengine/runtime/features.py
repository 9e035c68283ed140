"""Encoder outputs on the device, by key, and the way from pixels to them and into a batch."""

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


class KeptFeatures(Protocol):
    """Where encoder outputs are kept beyond this engine."""

    def came(self, key: bytes) -> torch.Tensor | None:
        """[embeddings, width] of an item that is to be encoded, if they came."""

    def encoded(self, key: bytes, features: torch.Tensor) -> None:
        """Those of an item were computed."""


class FeatureStore:
    """Features by key in one tensor: [places, (1 + num_deepstack) * hidden_size], a place an embedding.

    The first hidden_size values of an embedding go where its placeholder stands in the input, the
    others are added behind the first num_deepstack layers. What is kept and what goes is decided by
    the scheduler, and never more than `capacity` embeddings; the store only follows. The tensor doubles
    until it holds what is asked for, unless it was told to `hold_all`, and what was dropped is
    written over first.
    """

    def __init__(self, hidden_size: int, num_deepstack: int, capacity: int) -> None:
        self._hidden_size = hidden_size
        self._num_deepstack = num_deepstack
        self._capacity = capacity
        self._cache = torch.empty(0, 0)
        self._places: dict[bytes, np.ndarray] = {}  # int64, of each embedding of a key
        self._free = np.empty(0, np.int64)  # places that hold nothing, in its first _num_free entries
        self._num_free = 0

    def __len__(self) -> int:
        return len(self._places)

    def hold_all(self, dtype: torch.dtype, device: torch.device) -> None:
        """Take the memory of all places now: of a GPU a share is set aside for them, and growing would need
        half of that again. ConfigError where it cannot be had."""
        width = (1 + self._num_deepstack) * self._hidden_size
        try:
            self._go_on_in(torch.empty(self._capacity, width, dtype=dtype, device=device))
        except torch.OutOfMemoryError as error:
            raise ConfigError(
                f"the encoder cache of {self._capacity} embeddings needs "
                f"{self._capacity * width * dtype.itemsize / 2**30:.2f} GiB on {device}, which could not be "
                "had; lower encoder_cache_size"
            ) from error

    def put(self, keys: Sequence[bytes], sizes: Sequence[int], features: torch.Tensor) -> None:
        """Take over [sum of sizes, (1 + num_deepstack) * hidden_size], the items one after the other.
        ExecutorFailed where they do not fit the capacity."""
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
        """Forget `key`. One that is not there is no error: its encoding may have failed."""
        places = self._places.pop(key, None)
        if places is not None:
            self._free[self._num_free : self._num_free + len(places)] = places
            self._num_free += len(places)

    def held(self, key: bytes) -> torch.Tensor:
        """A copy of the features of a key, [embeddings, width]."""
        return self._cache.index_select(0, upload(self._places[key], self._cache.device))

    def clear(self) -> None:
        self._places.clear()
        self._cache, self._free, self._num_free = torch.empty(0, 0), self._free[:0], 0

    def _reserve(self, features: torch.Tensor) -> None:
        """Room for as many more embeddings, of their kind and on their device."""
        held = len(self._cache)
        missing = len(features) - self._num_free
        if missing <= 0:
            return
        size = min(max(held + missing, 2 * held), self._capacity)
        if size < held + missing:
            raise ExecutorFailed(
                f"{len(features)} embeddings do not fit the encoder cache of {self._capacity}: "
                f"{held - self._num_free} are held"
            )
        self._go_on_in(features.new_empty(size, features.shape[1]))

    def _go_on_in(self, cache: torch.Tensor) -> None:
        """With all that is held in a larger tensor."""
        held, size = len(self._cache), len(cache)
        if held:
            cache[:held] = self._cache
        self._cache = cache
        free = np.empty(size, np.int64)
        free[: size - held] = np.arange(size - 1, held - 1, -1)
        free[size - held : size - held + self._num_free] = self._free[: self._num_free]
        self._free, self._num_free = free, size - held + self._num_free

    def place(self, spans: Sequence[MediaSpan], embeds: torch.Tensor) -> torch.Tensor | None:
        """Write the spans into `embeds` [t, hidden_size] in place, all with one gather.

        Gives deepstack [num_deepstack, t, hidden_size], zero at text tokens, or None without spans.
        Raises ExecutorFailed for features that are not here.
        """
        if not spans:
            return None
        hidden, count = self._hidden_size, sum(span.length for span in spans)
        index = np.empty((2, count), np.int64)  # places in the cache, places in the batch
        at = 0
        for span in spans:
            index[0, at : at + span.length] = self._held(span)
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

    def _held(self, span: MediaSpan) -> np.ndarray:
        """Places of the embeddings of a span."""
        places = self._places.get(span.key)
        if places is None or span.item_start + span.length > len(places):
            raise ExecutorFailed(
                f"tokens {span.start} to {span.start + span.length} of the batch need features of media "
                f"item {span.key.hex()[:12]} that are not on the device"
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
    kept: KeptFeatures | None = None,
    adapter: LoadedAdapter | None = None,
) -> None:
    """Encode `items` in one packed call and put their features into `store`. `graphs`: of the model's
    encoder, which is launched where they do not have the call's size. `share`: what the features go through
    before they are kept. `alone`: in a call each, so that an item's features, and whether they are replayed,
    do not depend on who comes along. `last`: features of the last of `items`, which was encoded in parts.
    `kept`: has some items' features already, and keeps those of the others. `adapter`: with which all of
    them are encoded.

    `payloads`: the media of each request id. Raises ExecutorFailed where a payload is missing or the
    model gives another number of embeddings than the items have placeholders.
    """
    if kept is not None:
        items = _without_kept(items, store, kept, last)
        if not items:
            return
    if alone and len(items) > 1:
        for item in items:
            own = last if item is items[-1] else None
            encode(
                model, [item], payloads, store, device, graphs=graphs, share=share, last=own, adapter=adapter
            )
            if kept is not None:
                kept.encoded(item.key, store.held(item.key))
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
    if kept is not None:
        for item in items:
            kept.encoded(item.key, store.held(item.key))


def _without_kept(
    items: Sequence[EncodeItem], store: FeatureStore, kept: KeptFeatures, last: torch.Tensor | None
) -> list[EncodeItem]:
    """Those of `items` whose features are not there already; the last one where it was encoded in parts."""
    left = []
    for item in items:
        own = last is not None and item is items[-1]
        came = None if own else kept.came(item.key)
        if came is None or len(came) != item.request.media[item.index].num_embeds:
            left.append(item)
        else:
            store.put([item.key], [len(came)], came)
    return left


def payload_of(item: EncodeItem, payloads: Mapping[str, Sequence[MediaInput]]) -> MediaInput:
    """The pixels of an item. Raises ExecutorFailed where they are missing."""
    media = payloads.get(item.request.request_id, ())
    if item.index >= len(media):
        raise ExecutorFailed(
            f"media item {item.index} of request {item.request.request_id} was to be encoded, but its pixels "
            "were not attached"
        )
    return media[item.index]
