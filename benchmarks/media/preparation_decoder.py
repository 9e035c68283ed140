"""A decoder that returns constant patches, to measure only the transfer to a decoder process and back."""

import numpy as np

from mmengine.models.media_decoding import DecodedMedia, EncodedMedia, MediaDecoder

ROW_BYTES = 1536


def decoder(settings: bytes) -> MediaDecoder:
    """Return a decoder that returns the same patches for every image. `settings`: the number of rows, in
    decimal digits.
    """
    rows = np.ones((int(settings), ROW_BYTES), np.uint8)

    def decode(_: EncodedMedia) -> DecodedMedia:
        return DecodedMedia(rows, (1, 2, len(rows) // 2))

    return decode
