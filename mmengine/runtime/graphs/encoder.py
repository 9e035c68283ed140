"""Capture the encoder once per size and replay it: for a small image, launching hundreds of kernels takes
longer than running them.

The captured part leads from pixels to features, with fixed input and output addresses. Copies stay outside:
pixels come through pinned memory, and features are copied into the encoder cache. Everything runs on a single
stream, so with two steps in flight the second step's pixels arrive after the first step's are encoded. Not
yet run on a GPU.
"""

from collections.abc import Sequence

import numpy as np
import torch

from mmengine.models.plugin import CapturableEncoder, EncoderSize, VisionLanguageModel
from mmengine.runtime.device.port import Recorder
from mmengine.runtime.device.upload import upload_joined_into
from mmengine.runtime.graphs.capture import CAPTURE_FAILED, REPLAYED, capture
from mmengine.runtime.graphs.encoder_sizes import REASONS, encoder_sizes, size_of


class EncoderGraphs:
    """Captured encoder graphs, largest size first, so that smaller sizes can reuse the largest one's
    memory.

    `encoder` was made for the last size.
    """

    def __init__(self, encoder: CapturableEncoder, sizes: Sequence[EncoderSize], recorder: Recorder) -> None:
        self._encoder, self._sizes = encoder, sizes
        self.num_calls = dict.fromkeys((REPLAYED, *REASONS, CAPTURE_FAILED), 0)
        self._replays = capture(
            "images", reversed(sizes), lambda size: encoder.place(size, 0, ()), encoder.compute, recorder
        )

    def encode(
        self, patches: Sequence[np.ndarray], grids: Sequence[tuple[int, int, int]]
    ) -> torch.Tensor | None:
        """Return the features for items with these patches and grids, valid until the next call.

        Returns None, and counts the call, if no graph fits. Raises ValueError for patches that contradict
        their grids.
        """
        num_patches = sum(map(len, patches))
        found: EncoderSize | str = CAPTURE_FAILED
        if self._replays:
            found = size_of(self._sizes, num_patches, self._encoder.num_segments(grids))
        self.num_calls[REPLAYED if isinstance(found, EncoderSize) else found] += 1
        if not isinstance(found, EncoderSize):
            return None
        features = self._encoder.place(found, num_patches, grids)
        upload_joined_into(patches, self._encoder.patches)
        self._replays[found]()
        return features


def capture_encoder(model: VisionLanguageModel, budget: int, recorder: Recorder) -> EncoderGraphs | None:
    """Capture graphs for calls with up to `budget` embeddings; return None if the model's encoder cannot be
    captured.
    """
    sizes = encoder_sizes(budget, model.spec.merge_size)
    make = getattr(model, "capturable_encoder", None)
    encoder = make(sizes[-1]) if make is not None else None
    return None if encoder is None else EncoderGraphs(encoder, sizes, recorder)
