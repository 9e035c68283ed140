"""Runs transformers' processor on one image or video at a time, in a decoding worker or in the engine.

mmengine's own code decodes the image and checks its size and format. The processor gets the pixels.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from mmengine.errors import InvalidMedia, ModelError, in_one_line
from mmengine.models.media_decoding import DecodedMedia
from mmengine.processing.media.options import ImageOptions, VideoOptions
from mmengine.processing.media.patches import PatchSettings
from mmengine.processing.media.settings import CheckLength
from mmengine.processing.media.sources import Access
from mmengine_transformers.media.packing import pack
from mmengine_transformers.media.videos import read_frames, shrunk_size

_OPTIONS = frozenset({"max_pixels"})
_VIDEO_OPTIONS = frozenset(
    {
        *("fps", "num_frames", "nframes", "min_frames", "max_frames", "do_sample_frames"),
        *("video_start", "video_end", "sample_fps", "raw_fps"),
    }
)
# Processor outputs about prompt tokens. mmengine writes the prompt tokens itself and ignores these outputs.
_TEXT_KEYS = frozenset(
    {
        *("input_ids", "attention_mask", "token_type_ids", "mm_token_type_ids", "labels"),
        *("moe_mm_token_type_ids", "text_replacement_offsets", "special_tokens_mask"),
    }
)
_GRIDS = {"image": "image_grid_thw", "video": "video_grid_thw"}
_INTERVAL = "second_per_grid_ts"
MAX_PACKED_BYTES = 2**30 - 2**23  # Maximum size of an item's tensors, below a decoding worker's limit.


@dataclass(frozen=True, slots=True)
class HostedMedia:
    """Implements MediaSettings with the processor of the model in `folder`.

    `image`, `video`: an item's placeholder in a prompt; "" if the model does not support the modality.
    `image_prompt`, `video_prompt`: the prompt that the processor gets with an image or a video. `no_video`:
    why the model takes no videos. `video_template`: the chat template that the processor prefers for messages
    with videos, or "". `max_images`: maximum number of images in a prompt; 0: no limit. `max_videos`: maximum
    number of videos in a prompt; 0: no limit. If `max_videos` is not 0, a prompt with a video cannot have
    images. `embeds`: the placeholder tokens, whose embeddings the item's embeddings replace. `indicators`:
    special tokens in an item's text whose embeddings are the same for all items. `identity`: the processor's
    digest.
    """

    folder: str
    image: str
    image_prompt: str
    video: str
    video_prompt: str
    no_video: str
    video_template: str
    max_images: int
    max_videos: int
    embeds: tuple[str, ...]
    indicators: tuple[str, ...]
    identity: str
    max_image_pixels: int

    @property
    def patches(self) -> PatchSettings:
        return PatchSettings(1, 1, 1)

    @property
    def options(self) -> frozenset[str]:
        return _OPTIONS | _VIDEO_OPTIONS if self.video else _OPTIONS

    def describe(self) -> str:
        return json.dumps({**asdict(self), "folder": ""}, sort_keys=True)

    def prepare_image(
        self, image: Image.Image, options: ImageOptions, check_length: CheckLength, where: str
    ) -> DecodedMedia:
        """See MediaSettings. `max_pixels` shrinks the image before the processor gets it."""
        height, width = shrunk_size((image.height, image.width), options.max_pixels)
        self._check_early("image", (height, width), check_length)
        if image.size != (width, height):
            image = image.resize((width, height), Image.Resampling.BICUBIC)
        return self._packed("image", {"images": [image]}, check_length, where)

    def prepare_video(
        self, source: object, options: VideoOptions, access: Access, check_length: CheckLength, where: str
    ) -> DecodedMedia:
        """See MediaSettings. `max_pixels` shrinks the frames before the processor gets them."""
        if not self.video:
            raise InvalidMedia(f"{where} is not supported: {self.no_video}")

        def check_size(count: int, height: int, width: int) -> None:
            self._check_early("video", (count, height, width), check_length)

        inner = self._processor.video_processor
        frames, metadata = read_frames(source, options, access, inner, check_size, where)
        return self._packed("video", video_arguments(frames, metadata), check_length, where)

    def _check_early(self, modality: str, size: tuple[int, ...], check_length: CheckLength) -> None:
        """Check the item's number of tokens before its pixels are processed, if the processor can compute
        this number.
        """
        count = getattr(self._processor, "_get_num_multimodal_tokens", None)
        if count is None:
            return
        try:
            expected = count(**{f"{modality}_sizes": [size]})[f"num_{modality}_tokens"][0]
        except Exception:  # This processor cannot compute the length; `_packed` checks the length.
            return
        check_length(int(expected))

    def _packed(
        self, modality: str, media: Mapping[str, object], check_length: CheckLength, where: str
    ) -> DecodedMedia:
        try:
            text, tensors = process(self._processor, modality, self._prompt(modality), media)
        except ModelError:
            raise
        except (ValueError, TypeError, RuntimeError, ZeroDivisionError, OverflowError) as error:
            raise InvalidMedia(
                f"{where} is refused by the model's own processor: {in_one_line(error, 200)}"
            ) from None
        num_bytes = sum(values.nbytes for _, values in tensors.values())
        if num_bytes > MAX_PACKED_BYTES:
            raise InvalidMedia(
                f"{where} has {num_bytes} bytes after the model's processor; the limit is "
                f"{MAX_PACKED_BYTES}: send fewer frames or a smaller item"
            )
        places = re.findall("|".join(map(re.escape, (*self.indicators, *self.embeds))), text)
        num_embeds = len(places)
        check_length(num_embeds)
        indicators = tuple(
            (place, self.indicators.index(token))
            for place, token in enumerate(places)
            if token in self.indicators
        )
        size, interval = (1, 1, num_embeds), tensors.get(_INTERVAL)
        if (grid := tensors.get(_GRIDS[modality])) is not None:  # Kimi's grid has a row for each chunk.
            rows = grid[1].reshape(-1, 3)
            size = int(rows[:, 0].sum()), int(rows[0, 1]), int(rows[0, 2])
        return DecodedMedia(
            pack(text, num_embeds, tensors, indicators),
            size,
            interval=None if interval is None else float(interval[1].reshape(-1)[0]),
        )

    def _prompt(self, modality: str) -> str:
        return self.image_prompt if modality == "image" else self.video_prompt

    @property
    def _processor(self) -> Any:
        # Slow to import: transformers loads torch.
        from mmengine_transformers.media.processors import open_processor

        return open_processor(Path(self.folder))


def video_arguments(frames: np.ndarray, metadata: Mapping[str, object]) -> dict[str, object]:
    """Return the processor's arguments for sampled frames, uint8 [t, 3, h, w]."""
    return {
        "videos": [frames],
        "video_metadata": [dict(metadata)],
        "do_sample_frames": False,
        "return_metadata": True,  # Some processors compute the prompt's frame times from the metadata.
        "input_data_format": "channels_first",
    }


def process(
    processor: Any, modality: str, prompt: str, media: Mapping[str, object]
) -> tuple[str, dict[str, tuple[str, np.ndarray]]]:
    """Return the text that the processor inserts for one item, and the item's tensors: name -> (torch's
    dtype, stored values).

    `prompt`: a prompt with one placeholder. Raises ModelError if the processor does not report the inserted
    text.
    """
    out = processor(text=prompt, **media, return_text_replacement_offsets=True, return_tensors="pt")
    found = out.get("text_replacement_offsets")
    entries = [entry for entry in (found[0] if found else ()) if entry.get("type") == modality]
    if len(entries) != 1:
        raise ModelError(
            f"the processor {type(processor).__name__} does not tell which text stands for one {modality} "
            "(text_replacement_offsets), so a prompt cannot be split by item"
        )
    tensors = {}
    for name, value in out.items():
        if name not in _TEXT_KEYS and hasattr(value, "dtype"):
            tensors[name] = _stored(value)
    return entries[0]["replacement"], tensors


def _stored(value: Any) -> tuple[str, np.ndarray]:
    """Return torch's name of a tensor's dtype, and the tensor's stored values."""
    name = str(value.dtype).removeprefix("torch.")
    if name == "bfloat16":
        return name, value.contiguous().view(dtype=_uint16()).numpy()
    return name, np.asarray(value)


def _uint16() -> Any:
    import torch  # Already loaded by the processor.

    return torch.uint16
