"""Captures the encoder in several sizes, and replays it. Not yet run on a GPU.

For a small image, launching the kernels takes longer than running them. A graph computes features from
pixels, at fixed addresses. Pixels are copied in before the graph runs, and features are copied to the encoder
cache afterwards. All work runs on a single stream, so a later step overwrites pixels only after they were
encoded.
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
    """The encoder's captured graphs. The largest graph is captured first, so that the smaller graphs can
    reuse its memory.

    `sizes`: ascending. `encoder` must be created for the largest size. `num_calls`: the number of calls by
    outcome, which is REPLAYED or the reason why a call was not replayed.
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
        """Return the features for items with these patches and grids, or None if no graph fits.

        The features are valid until the next call. Raises ValueError if the patches contradict their grids.
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
    """Capture graphs for calls with at most `budget` embeddings. Returns None if the encoder cannot be
    captured.
    """
    sizes = encoder_sizes(budget, model.spec.merge_size)
    make = getattr(model, "capturable_encoder", None)
    encoder = make(sizes[-1]) if make is not None else None
    return None if encoder is None else EncoderGraphs(encoder, sizes, recorder)
