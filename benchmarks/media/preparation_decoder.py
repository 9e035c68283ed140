"""A decoder that decodes nothing, to measure the way to a process and back."""

import numpy as np

from mmengine.models.media_decoding import DecodedMedia, EncodedMedia, MediaDecoder

ROW_BYTES = 1536


def decoder(settings: bytes) -> MediaDecoder:
    """Return a decoder whose images have as many rows as `settings` says."""
    rows = np.ones((int(settings), ROW_BYTES), np.uint8)

    def decode(_: EncodedMedia) -> DecodedMedia:
        return DecodedMedia(rows, (1, 2, len(rows) // 2))

    return decode
