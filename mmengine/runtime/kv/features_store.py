"""Keeps encoder outputs that a block store has sent, until no request needs them."""

import hashlib
import threading

import torch
from torch import Tensor

from mmengine.block_store.sealed import SEAL_BYTES

MAX_FEATURE_BYTES = 2**29  # maximum size of the kept features


class FetchedFeatures:
    """Encoder outputs on the host, by encoder key. `width`: number of values in an embedding. `dtype`: dtype
    of a value.
    """

    def __init__(self, width: int, dtype: torch.dtype, device: torch.device) -> None:
        self._width, self._dtype, self._device = width, dtype, device
        self._lock = threading.Lock()
        self._came: dict[bytes, Tensor] = {}
        self._for: dict[bytes, set[str]] = {}  # encoder key -> requests that need the features
        self._bytes = 0

    def name(self, key: bytes) -> bytes:
        """Return the features' 16-byte name in the block store."""
        return hashlib.blake2b(key, digest_size=16, person=b"mmengine-encoded").digest()

    def room_for(self, num_embeds: int) -> Tensor | None:
        """Return a uint8 buffer for a seal (block_store/sealed.py) and an item's features. Returns None if
        the features would exceed the limit.
        """
        size = num_embeds * self._width * self._dtype.itemsize
        with self._lock:
            if self._bytes + size > MAX_FEATURE_BYTES:
                return None
        return torch.empty(SEAL_BYTES + size, dtype=torch.uint8)

    def keep(self, request_id: str, key: bytes, value: Tensor) -> None:
        """Store features until `forget` was called for all requests that need them. `value`: a seal and the
        features, as the block store sent them, after verification.
        """
        with self._lock:
            if key not in self._came:
                self._came[key] = value[SEAL_BYTES:].view(self._dtype).view(-1, self._width)
                self._bytes += value.nbytes
            self._for.setdefault(key, set()).add(request_id)

    def fetched_features(self, key: bytes) -> Tensor | None:
        """Return the features, [embeddings, width] on the device, or None if they were not fetched."""
        with self._lock:
            rows = self._came.get(key)
        return None if rows is None else rows.to(self._device)

    def forget(self, request_id: str) -> None:
        with self._lock:
            for key in [key for key, names in self._for.items() if request_id in names]:
                self._for[key].discard(request_id)
                if not self._for[key]:
                    del self._for[key]
                    self._bytes -= self._came.pop(key).nbytes + SEAL_BYTES
