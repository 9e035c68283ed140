"""Input and output of a media decoder, as plain data, so that the decoder can be a separate process."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import numpy as np

Encoded = bytes | Path  # An encoded file's bytes or its path.


class FrameTimes(NamedTuple):
    """Known facts about a list of frames: their rate, and their indices in the original video."""

    fps: float | None = None
    indices: tuple[int, ...] | None = None


@dataclass(frozen=True, slots=True)
class EncodedMedia:
    """An image or a video as the client sent it.

    `data`: a file, or a video's frames as image files. `options`: checked values by name. `where`: the item's
    name in errors.
    """

    modality: str
    data: Encoded | tuple[Encoded, ...]
    options: Mapping[str, bool | int | float]
    where: str
    times: FrameTimes | None = None


@dataclass(frozen=True, slots=True)
class DecodedMedia:
    """Patches of an image or a video.

    `patches`: uint8 [num_patches, patch_width], as in MediaInput. `timestamps`: a video's time in seconds for
    each temporal patch. `duration`: a video's length in seconds. `tiles`: rows and columns that an image was
    cut into, (0, 0) for an uncut image.
    """

    patches: np.ndarray = field(repr=False)
    grid: tuple[int, int, int]
    timestamps: tuple[float, ...] = ()
    duration: float = 0.0
    tiles: tuple[int, int] = (0, 0)


# Raises InvalidMedia, InvalidRequest.
MediaDecoder = Callable[[EncodedMedia], DecodedMedia]


class DecoderRecipe(NamedTuple):
    """How another process makes a decoder: with `module.decoder(settings)`. Importing the module loads
    neither torch nor a tokenizer. `done`: the participle for the decoder's work, for errors.
    """

    module: str
    settings: bytes
    done: str = "decoded"
