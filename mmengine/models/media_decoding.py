"""A media decoder's input and output as plain data, so that the decoder can run in another process."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import numpy as np

Encoded = bytes | Path  # The bytes of an encoded file, or its path.


class FrameTimes(NamedTuple):
    """The rate of listed frames, and their indices in the original video; None if unknown."""

    fps: float | None = None
    indices: tuple[int, ...] | None = None


@dataclass(frozen=True, slots=True)
class EncodedMedia:
    """An image or a video as the client sent it.

    `data`: an encoded file, or a video's frames as encoded images. `options`: checked values by name.
    `where`: the item's name in errors.
    """

    modality: str
    data: Encoded | tuple[Encoded, ...]
    options: Mapping[str, bool | int | float]
    where: str
    times: FrameTimes | None = None


@dataclass(frozen=True, slots=True)
class DecodedMedia:
    """An image's or a video's patches.

    `patches`: uint8 [num_patches, patch_width], as in MediaInput. `grid`: temporal patches, rows and columns.
    `timestamps`: for a video, each temporal patch's time in seconds. `duration`: a video's length in seconds.
    `tiles`: how many rows and columns of tiles an image was cut into; (0, 0) for an uncut image.
    """

    patches: np.ndarray = field(repr=False)
    grid: tuple[int, int, int]
    timestamps: tuple[float, ...] = ()
    duration: float = 0.0
    tiles: tuple[int, int] = (0, 0)


# Raises InvalidMedia, InvalidRequest.
MediaDecoder = Callable[[EncodedMedia], DecodedMedia]


class DecoderRecipe(NamedTuple):
    """How another process makes a decoder: by calling `module.decoder(settings)`. Importing the module loads
    neither torch nor a tokenizer. `done`: the past participle that errors use for the decoder's work.
    """

    module: str
    settings: bytes
    done: str = "decoded"
