"""What goes to a decoder of images and videos, and what comes back: plain data, so that the decoder can be a
process of its own."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import numpy as np

Encoded = bytes | Path  # an encoded file, or where it stands


class FrameTimes(NamedTuple):
    """What is known of the frames of a list: their rate, and which frames of the original they are."""

    fps: float | None = None
    indices: tuple[int, ...] | None = None


@dataclass(frozen=True, slots=True)
class EncodedMedia:
    """An image or a video as it was sent. `data`: one file, or the frames of a video as files of images.
    `options`: checked, by name. `where`: how errors call it."""

    modality: str
    data: Encoded | tuple[Encoded, ...]
    options: Mapping[str, bool | int | float]
    where: str
    times: FrameTimes | None = None


@dataclass(frozen=True, slots=True)
class DecodedMedia:
    """`patches`: uint8 [num_patches, patch_width], as in MediaInput; `timestamps`: of a video the time in
    seconds of each temporal patch, and `duration`, how long it is; `tiles`: rows and columns of those that an
    image was cut into, (0, 0) for one that was not."""

    patches: np.ndarray = field(repr=False)
    grid: tuple[int, int, int]
    timestamps: tuple[float, ...] = ()
    duration: float = 0.0
    tiles: tuple[int, int] = (0, 0)


# Raises InvalidMedia, InvalidRequest.
MediaDecoder = Callable[[EncodedMedia], DecodedMedia]


class DecoderRecipe(NamedTuple):
    """How another process makes a decoder: by `module.decoder(settings)`. Importing the module brings
    neither torch nor a tokenizer. `done`: what it does with an item, in errors."""

    module: str
    settings: bytes
    done: str = "decoded"
