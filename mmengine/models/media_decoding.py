"""Defines a media decoder's input and output as plain data for use across processes."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import numpy as np

Encoded = bytes | Path  # An encoded file, as bytes or as a path.


class FrameTimes(NamedTuple):
    """The timing for a video that was sent as a list of frames. `fps`: frames per second. `indices`: the
    frames' indices in the original video. `total`: number of frames in the original video. None: unknown.
    """

    fps: float | None = None
    indices: tuple[int, ...] | None = None
    total: int | None = None


@dataclass(frozen=True, slots=True)
class EncodedMedia:
    """An image or a video as the client sent it.

    `data`: an encoded file, or a video's frames as encoded images. `options`: checked values by option name.
    `where`: the item's name in error messages.
    """

    modality: str
    data: Encoded | tuple[Encoded, ...]
    options: Mapping[str, bool | int | float]
    where: str
    times: FrameTimes | None = None


@dataclass(frozen=True, slots=True)
class DecodedMedia:
    """The patches that were decoded from an image or a video.

    `patches`: uint8 [num_patches, patch_width], as in MediaInput. `grid`: how many temporal patches, rows and
    columns there are. `timestamps`: each temporal patch's time in a video, in seconds. `duration`: a video's
    length in seconds. `tiles`: rows and columns of an image's tiles; (0, 0) for an image without tiles.
    `interval`: seconds between temporal patches, if positions depend on time.
    """

    patches: np.ndarray = field(repr=False)
    grid: tuple[int, int, int]
    timestamps: tuple[float, ...] = ()
    duration: float = 0.0
    tiles: tuple[int, int] = (0, 0)
    interval: float | None = None


# A media decoder raises InvalidMedia or InvalidRequest.
MediaDecoder = Callable[[EncodedMedia], DecodedMedia]


class DecoderRecipe(NamedTuple):
    """Describes how another process makes a decoder. The process calls `module.decoder(settings)`.

    Importing the module must load neither torch nor a tokenizer. `done`: a past participle for error
    messages, such as "decoded".
    """

    module: str
    settings: bytes
    done: str = "decoded"
