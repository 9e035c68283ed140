"""Prepares media for SmolVLM2: converts an image to equal tiles and a thumbnail of the whole image, and a
video to frames of a tile's size.

The sizes equal those of transformers' processors. An image is resized to a given longest edge, then to
multiples of a tile's side, and cut into tiles. An image that fits into one tile is not cut. Images are
resized with Pillow's filter, and videos with torch's filter.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from PIL import Image

from mmengine.errors import InvalidRequest, ModelError
from mmengine.models.media_decoding import DecodedMedia
from mmengine.processing.media.options import LONGEST, SPLITS, ImageOptions, VideoOptions
from mmengine.processing.media.patches import PatchSettings, patchify
from mmengine.processing.media.resample import resize
from mmengine.processing.media.settings import (
    CheckLength,
    check_constants,
    read_integer,
    read_rate,
    read_section,
)
from mmengine.processing.media.sources import Access
from mmengine.processing.media.video import load_video, span_of

MAX_EDGE = 4096  # Maximum longest edge of a resized image, in pixels.
SKIPPED_S = 1.0  # Seconds that `sample` skips at each end of a long video.
_EDGE, _SIDE = 4 * 364, 364  # Default longest edge and tile side in transformers' processors.
_DONE = {
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
    "rescale_factor": 1 / 255,
    "resample": 1,
    "do_convert_rgb": True,
    "do_normalize": True,
    "do_rescale": True,
    "do_resize": True,
}
_OPTIONS = frozenset(
    {
        *(LONGEST, SPLITS, "do_resize", "max_pixels", "fps", "num_frames", "nframes", "do_sample_frames"),
        *("video_start", "video_end", "sample_fps", "raw_fps"),
    }
)


@dataclass(frozen=True, slots=True)
class TileSettings:
    """Implements MediaSettings (processing/media/settings.py) and VideoRules (processing/media/video.py).

    All edges are in pixels. `side`: a tile's side. `longest_edge`: the longest edge of an image before
    it is cut into tiles. `frame_edge`: the longest edge of a frame before it is resized to a tile.
    """

    patches: PatchSettings
    side: int
    longest_edge: int
    do_image_splitting: bool
    frame_edge: int
    fps: float
    max_frames: int
    do_sample_frames: bool

    @property
    def options(self) -> frozenset[str]:
        return _OPTIONS

    @property
    def max_image_pixels(self) -> int:
        return self.longest_edge**2

    @property
    def seen(self) -> int:
        """Return how many pixels along a tile's side are covered by patches."""
        return self.side // self.patches.patch_size * self.patches.patch_size

    @property
    def embeds(self) -> int:
        return (self.seen // self.patches.factor) ** 2

    def describe(self) -> str:
        return json.dumps(asdict(self), sort_keys=True)

    def prepare_image(
        self, image: Image.Image, options: ImageOptions, check_length: CheckLength, where: str
    ) -> DecodedMedia:
        size = (image.height, image.width)
        if options.resize:
            size = fitted(size, self._edge(size, options, where))
        rows, columns = self._tiling(size) if self._splits(options) else (1, 1)
        is_cut = rows * columns > 1
        num_tiles = rows * columns + is_cut
        check_length(num_tiles * self.embeds)
        image = image.resize(size[::-1], Image.Resampling.LANCZOS)
        image = image.resize((columns * self.side, rows * self.side), Image.Resampling.LANCZOS)
        tiles = np.empty((num_tiles, 3, self.seen, self.seen), np.uint8)
        for place in range(rows * columns):
            row, column = divmod(place, columns)
            tiles[place] = self._tile(image, row * self.side, column * self.side)
        if is_cut:
            tiles[-1] = self._tile(image.resize((self.side, self.side), Image.Resampling.LANCZOS), 0, 0)
        return DecodedMedia(*patchify(tiles, self.patches), tiles=(rows, columns) if is_cut else (0, 0))

    def prepare_video(
        self, source: object, options: VideoOptions, access: Access, check_length: CheckLength, where: str
    ) -> DecodedMedia:
        return load_video(source, options, self, access, check_length, where)

    def _splits(self, options: ImageOptions) -> bool:
        return self.do_image_splitting if options.splits is None else options.splits

    def _edge(self, size: tuple[int, int], options: ImageOptions, where: str) -> int:
        """Return the longest edge to which an image is resized. The edge shrinks until all tiles together
        have at most `max_pixels` pixels, or until a single tile remains.
        """
        edge = self.longest_edge if options.longest_edge is None else options.longest_edge
        if edge > MAX_EDGE:
            raise InvalidRequest(f"{where}: longest_edge is {edge}; the limit is {MAX_EDGE} pixels")
        if options.max_pixels is None or not self._splits(options):
            return edge
        while edge > self.side:
            if math.prod(self._tiling(fitted(size, edge))) * self.side**2 <= options.max_pixels:
                return edge
            edge = (edge - 1) // self.side * self.side
        return edge

    def _tiling(self, size: tuple[int, int]) -> tuple[int, int]:
        """Return the number of rows and columns of tiles for an image of `size`, (height, width)."""
        height, width = size
        if width >= height:
            columns = math.ceil(width / self.side)
            return max(1, math.ceil(int(columns * self.side / (width / height)) / self.side)), columns
        rows = math.ceil(height / self.side)
        return rows, max(1, math.ceil(int(rows * self.side * (width / height)) / self.side))

    def _tile(self, image: Image.Image, top: int, left: int) -> np.ndarray:
        """Return the tile at (top, left), uint8 [3, seen, seen]."""
        return np.asarray(image.crop((left, top, left + self.seen, top + self.seen))).transpose(2, 0, 1)

    def sample(self, num_frames: int, fps: float, options: VideoOptions, where: str) -> np.ndarray:
        """Return the sampled frames' indices (see VideoRules). The option `num_frames` is a maximum."""
        span = span_of(num_frames, fps, options, where)
        rate, most = options.fps or self.fps, options.num_frames or self.max_frames
        seconds = span.num_frames / fps
        count = max(1, min(round(rate * seconds), most))
        first, last = span.first, span.last
        if (options.start, options.end) == (None, None) and seconds - 2 * SKIPPED_S > most * rate:
            first, last = int(SKIPPED_S * fps), min(last, int(num_frames - SKIPPED_S * fps))
        if first >= last:
            first, last = span.first, span.last
        return np.unique(np.linspace(first, last, count, dtype=np.int64))

    def frame_size(
        self, num_frames: int, size: tuple[int, int], options: VideoOptions, where: str
    ) -> tuple[int, int]:
        """Return a tile's size. Raises InvalidRequest if another size is requested."""
        if options.longest_edge is not None or not options.resize:
            name = LONGEST if options.resize else "do_resize"
            raise InvalidRequest(f"{where}: {name} is not supported for a video, whose frames are tiles")
        return self.seen, self.seen

    def resized(self, frame: np.ndarray, size: tuple[int, int]) -> np.ndarray:
        frame = resize(frame, *fitted(frame.shape[1:], self.frame_edge), by="lanczos")
        return resize(frame, self.side, self.side, by="lanczos")[:, : size[0], : size[1]]


def fitted(size: tuple[int, ...], edge: int) -> tuple[int, int]:
    """Return the (height, width) with the longest edge `edge` and the aspect ratio of `size`. The other edge
    is even, or 1.
    """
    height, width = size
    if width >= height:
        shorter = int(edge / (width / height))
        return max(1, shorter + shorter % 2), edge
    shorter = int(edge * (width / height))
    return edge, max(1, shorter + shorter % 2)


def read_tiles(folder: Path, patches: PatchSettings, side: int) -> TileSettings:
    """Return the settings in a folder's files, with transformers' defaults for missing fields.

    `side`: the tile side that the vision tower expects. Raises ModelError, which names the file and the
    field, for invalid values and for files with another tile side.
    """
    image, image_path = read_section(folder, "image_processor", "preprocessor_config.json")
    video, video_path = read_section(
        folder, "video_processor", "video_preprocessor_config.json", optional=True
    )
    if not video:
        video, video_path = image, image_path
    for values, path in ((image, image_path), (video, video_path)):
        check_constants(values, path, _DONE)
        found = _edge_of(values, path, "max_image_size", _SIDE)
        if found != side:
            raise ModelError(
                f"{path}: max_image_size is {found}, but vision_config.image_size in config.json is {side}; "
                "tiles of another size are not supported"
            )
    sampling = video.get("video_sampling")
    sampling = sampling if isinstance(sampling, dict) else {}
    size = video if "size" in video else {"size": sampling.get("video_size")}
    named = {"num_frames": video.get("num_frames"), "fps": video.get("fps")}
    named |= {"num_frames": sampling.get("max_frames"), "fps": sampling.get("fps")} if sampling else {}
    known = {name: value for name, value in named.items() if value is not None}
    return TileSettings(
        patches=patches,
        side=side,
        longest_edge=_edge_of(image, image_path, "size", _EDGE),
        do_image_splitting=image.get("do_image_splitting", True) is not False,
        frame_edge=_edge_of(size, video_path, "size", _EDGE),
        fps=read_rate(known, video_path, "fps", 1.0),
        max_frames=read_integer(known, video_path, "num_frames", 64),
        do_sample_frames=video.get("do_sample_frames", True) is not False,
    )


def _edge_of(values: Mapping[str, object], path: Path, name: str, default: int) -> int:
    size = values.get(name)
    if size is None:
        return default
    if not isinstance(size, dict) or set(size) != {LONGEST}:
        raise ModelError(f"{path}: {name} is {repr(size)[:60]}; it must be an object with longest_edge")
    return read_integer(size, path, LONGEST, default, MAX_EDGE)
