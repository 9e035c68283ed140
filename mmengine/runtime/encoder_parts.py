"""Encodes a large media item in parts over several steps, and keeps the encoder's state between the parts."""

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import torch

from mmengine.core.executor import EncodePart
from mmengine.models.lora.adapter import LoadedAdapter
from mmengine.models.plugin import MediaInput, VisionLanguageModel
from mmengine.runtime.device.upload import upload_joined
from mmengine.runtime.features import payload_of


class _Encoding(Protocol):
    def advance(self, until: int, work: int) -> torch.Tensor | None: ...


class EncoderParts:
    """The encoder's intermediate state for a single item. The state may take a gigabyte.

    The state is kept until the last part of the item was computed, or until `drop` is called.
    """

    def __init__(self, model: VisionLanguageModel, even_patches: int, device: torch.device) -> None:
        self._begin: Callable[..., _Encoding] | None = getattr(model, "encode_in_parts", None)
        self._even_patches, self._device = even_patches, device
        self._key = b""
        self._encoding: _Encoding | None = None

    @property
    def is_held(self) -> bool:
        return self._encoding is not None

    def advance(
        self,
        part: EncodePart,
        payloads: Mapping[str, Sequence[MediaInput]],
        adapter: Callable[[], LoadedAdapter | None],
    ) -> torch.Tensor | None:
        """Compute one part. Returns the item's features after the last part, and None after other parts.

        Features are [num_embeds, (1 + num_deepstack) * hidden_size]. `payloads`: media by request id.
        `adapter`: returns the item's adapter. `adapter` is called only for the first part, because a call may
        read files. Raises ExecutorFailed if the media or the adapter are missing.
        """
        if self._encoding is None or self._key != part.item.key or not part.start:
            if part.start and not part.is_last:
                return None  # the item was dropped: no request needs its features
            assert self._begin is not None, "only encoders that can pause encode items in parts"
            media, adapted = payload_of(part.item, payloads), adapter()
            pixels = upload_joined([media.patches], self._device)
            self.clear()  # first, because the states of two items may not fit into memory
            self._key = part.item.key
            adapter_args = () if adapted is None else (adapted,)
            self._encoding = self._begin(pixels, media.item.grid, self._even_patches, *adapter_args)
        assert self._encoding is not None
        features = self._encoding.advance(part.until, part.work)
        if part.is_last:
            self.clear()
        return features

    def drop(self, key: bytes) -> None:
        if key == self._key:
            self.clear()

    def clear(self) -> None:
        self._key, self._encoding = b"", None
