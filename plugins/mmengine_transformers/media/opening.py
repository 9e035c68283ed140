"""Finds out how a model's processor writes an image into a prompt, by trying the processor."""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from mmengine.errors import ModelError, in_one_line
from mmengine.processing.chat.tokens import ChatTokenizer
from mmengine.processing.media.options import ImageOptions
from mmengine_transformers.media.features import MediaEncoder
from mmengine_transformers.media.processors import identity, open_processor
from mmengine_transformers.media.rules import image_token_id
from mmengine_transformers.media.settings import HostedMedia, process

_PROBE_SIZE = (96, 64)  # Width and height of the test image in pixels.
CHANNELS = 3
# The processor's attributes, tried in this order, that may contain the placeholder text for an image.
_MARKERS = ("image_placeholder_token", "image_token")


def open_media(folder: Path, config: Any) -> HostedMedia | None:
    """Return the media settings for the model in `folder`, or None for a text model. `config`: its config.

    Raises ModelError if the model takes images, but its processor cannot be used.
    """
    if image_token_id(config) is None:
        return None
    tokenizer, processor = ChatTokenizer.of_folder(folder), open_processor(folder)
    names = {token: name for name, token in tokenizer.marked.items()}
    placeholder = names.get(image_token_id(config))
    if placeholder is None:
        raise ModelError(
            f"{folder}: token {image_token_id(config)}, which stands for an image's embeddings in "
            "config.json, is not a special token of tokenizer.json"
        )
    indicators = getattr(config, "visual_indicator_token_ids", None) or ()  # Ovis 2.
    marker = _image_marker(processor)
    prompt, tensors = _try_image(processor, marker)
    return HostedMedia(
        folder=str(folder),
        image=marker,
        image_prompt=prompt,
        video="",
        # LLaVA-OneVision's processor treats several images differently from one image.
        max_images=1 if "batch_num_images" in tensors else 0,
        embeds=(placeholder,),
        indicators=tuple(names[token] for token in indicators),
        identity=identity(processor),
        max_image_pixels=_pixels(processor, tensors),
    )


def open_encoder(model: Any, folder: Path) -> MediaEncoder | None:
    """Return a loaded model's encoder, or None for a text model. Checks the encoder with a small image.
    Raises ModelError.
    """
    settings = open_media(folder, model.config)
    if settings is None:
        return None
    found = settings.prepare_image(sample_image(), ImageOptions(), lambda _: None, "the probe image")
    return MediaEncoder(model, torch.from_numpy(found.patches))


def _image_marker(processor: Any) -> str:
    """Return the text that stands for an image in a prompt. Raises ModelError."""
    for name in _MARKERS:
        marker = getattr(processor, name, None)
        if isinstance(marker, str) and marker:
            return marker
    raise ModelError(f"the processor {type(processor).__name__} names no token for an image")


def _try_image(processor: Any, marker: str) -> tuple[str, dict[str, tuple[str, np.ndarray]]]:
    """Return the text with which the processor accepts one image, and a small image's tensors.

    The text is the marker, or the marker between an image's start and end tokens. Raises ModelError.
    """
    ends = [str(getattr(processor, f"image_{end}_token", "") or "") for end in ("start", "end")]
    reasons = []
    for prompt in dict.fromkeys((marker, f"{ends[0]}{marker}{ends[1]}")):
        try:
            return prompt, process(processor, "image", prompt, {"images": [sample_image()]})[1]
        except ModelError:
            raise
        except Exception as error:  # Processors may raise any exception if settings do not fit each other.
            reasons.append(error)
    raise ModelError(
        f"the processor {type(processor).__name__} cannot process an image: {in_one_line(reasons[0], 200)}"
    ) from reasons[0]


def sample_image() -> Image.Image:
    """Return a small image of noise."""
    width, height = _PROBE_SIZE
    pixels = np.random.default_rng(0).integers(0, 255, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(pixels)


def _pixels(processor: Any, tensors: dict[str, tuple[str, np.ndarray]]) -> int:
    """Return the maximum number of pixels in a processed image. If the processor has no limit, return how
    many pixels the processed test image has.
    """
    size = dict(getattr(getattr(processor, "image_processor", None), "size", None) or {})
    most = size.get("longest_edge") if "shortest_edge" in size else None
    if isinstance(most, int):
        return most
    return max(sum(values.size for name, (_, values) in tensors.items() if "pixel" in name) // CHANNELS, 1)
