"""Encoder outputs on the device, by key, and the way from pixels to them and into a batch."""

from collections.abc import Mapping, Sequence

import numpy as np
import torch

from mmengine.core.executor import EncodeItem, MediaSpan
from mmengine.errors import ExecutorFailed
from mmengine.models.plugin import MediaInput, VisionLanguageModel
from mmengine.runtime.upload import upload


class FeatureStore:
    """Features by key: [n, (1 + num_deepstack) * hidden_size], n embeddings of a media item.

    The first hidden_size values of an embedding go where its placeholder stands in the input, the
    others are added behind the first num_deepstack layers. What is kept and what goes is decided by
    the scheduler; the store only follows.
    """

    def __init__(self, hidden_size: int, num_deepstack: int) -> None:
        self._hidden_size = hidden_size
        self._num_deepstack = num_deepstack
        self._features: dict[bytes, torch.Tensor] = {}

    def __len__(self) -> int:
        return len(self._features)

    def put(self, key: bytes, features: torch.Tensor) -> None:
        self._features[key] = features

    def drop(self, key: bytes) -> None:
        """Forget `key`. One that is not there is no error: its encoding may have failed."""
        self._features.pop(key, None)

    def clear(self) -> None:
        self._features.clear()

    def place(self, spans: Sequence[MediaSpan], embeds: torch.Tensor) -> torch.Tensor | None:
        """Write the spans into `embeds` [t, hidden_size] in place.

        Gives deepstack [num_deepstack, t, hidden_size], zero at text tokens, or None without spans.
        Raises ExecutorFailed for features that are not here.
        """
        if not spans:
            return None
        hidden = self._hidden_size
        deepstack = embeds.new_zeros(self._num_deepstack, embeds.shape[0], hidden)
        for span in spans:
            features = self._features.get(span.key)
            if features is None or span.item_start + span.length > features.shape[0]:
                raise ExecutorFailed(
                    f"tokens {span.start} to {span.start + span.length} of the batch need features of media "
                    f"item {span.key.hex()[:12]} that are not on the device"
                )
            part = features[span.item_start : span.item_start + span.length]
            places = slice(span.start, span.start + span.length)
            embeds[places] = part[:, :hidden]
            deepstack[:, places] = (
                part[:, hidden:].view(span.length, self._num_deepstack, hidden).transpose(0, 1)
            )
        return deepstack if self._num_deepstack else None


def encode(
    model: VisionLanguageModel,
    items: Sequence[EncodeItem],
    payloads: Mapping[str, Sequence[MediaInput]],
    store: FeatureStore,
    device: torch.device,
) -> None:
    """Encode `items` in one packed call and put their features into `store`.

    `payloads`: the media of each request id. Raises ExecutorFailed where a payload is missing or the
    model gives another number of embeddings than the items have placeholders.
    """
    media = [_payload(item, payloads) for item in items]
    patches = upload(np.concatenate([one.patches for one in media]), device)
    features = model.encode(patches, [one.item.grid for one in media])
    sizes = [one.item.num_embeds for one in media]
    if features.shape[0] != sum(sizes):
        raise ExecutorFailed(
            f"the encoder gave {features.shape[0]} embeddings for media items with {sum(sizes)} placeholders"
        )
    for item, part in zip(items, features.split(sizes), strict=True):
        # A copy of its own: a view would keep the whole pack alive as long as any item of it.
        store.put(item.key, part if len(items) == 1 else part.clone())


def _payload(item: EncodeItem, payloads: Mapping[str, Sequence[MediaInput]]) -> MediaInput:
    media = payloads.get(item.request.request_id, ())
    if item.index >= len(media):
        raise ExecutorFailed(
            f"media item {item.index} of request {item.request.request_id} was to be encoded, but its pixels "
            "were not attached"
        )
    return media[item.index]
