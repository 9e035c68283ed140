"""Determines how a model's processor writes an image or a video into a prompt, with test calls."""

import logging
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from transformers import PreTrainedConfig

from mmengine.errors import InvalidMedia, ModelError, in_one_line
from mmengine.processing.chat.tokens import ChatTokenizer
from mmengine.processing.media.options import ImageOptions, VideoOptions
from mmengine.processing.media.sources import Access
from mmengine_transformers.media.features import MediaEncoder
from mmengine_transformers.media.processors import identity, open_processor, refuse_videos
from mmengine_transformers.media.rules import image_token_id, media_rules, video_token_id
from mmengine_transformers.media.settings import HostedMedia, process, video_arguments

_PROBE_SIZE = (96, 64)  # Width and height of the test image in pixels.
CHANNELS = 3
# Processor attributes that may contain an item's placeholder text, in the order of the search.
_MARKERS = ("{}_placeholder_token", "{}_token")
_NUM_FRAMES, _FPS = 4, 2.0  # The test video.
_log = logging.getLogger("mmengine.models")
Tensors = dict[str, tuple[str, np.ndarray]]


def open_media(folder: Path, config: Any) -> HostedMedia | None:
    """Return the media settings for the model in `folder`, or None for a text model.

    Raises ModelError for a multimodal model with an unsupported processor.
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
    indicators = _indicators(config, processor)
    marker = _marker(processor, "image")
    prompt, _, tensors = _try_item(processor, "image", marker, {"images": [sample_image()]})
    embeds = list(filter(None, (placeholder, names.get(video_token_id(config) or -1))))
    video, video_prompt, no_video = _open_video(processor, embeds)
    return HostedMedia(
        folder=str(folder),
        image=marker,
        image_prompt=prompt,
        video=video,
        video_prompt=video_prompt,
        no_video=no_video,
        # SmolVLM's processor has a template for videos.
        video_template=str(getattr(sys.modules[type(processor).__module__], "DEFAULT_CHAT_TEMPLATE", "")),
        # LLaVA-OneVision's processor treats several images differently from one image.
        max_images=1 if "batch_num_images" in tensors else 0,
        max_videos=1 if config.model_type == "molmo2" else 0,  # Molmo 2's processor refuses two videos.
        embeds=tuple(dict.fromkeys(embeds)),
        indicators=tuple(names[token] for token in indicators),
        identity=identity(processor),
        max_image_pixels=_pixels(processor, tensors),
    )


def _indicators(config: PreTrainedConfig, processor: object) -> Sequence[int]:
    """Return the ids of an item's special tokens whose embeddings are the same for all items. Ovis 2 has
    separate constants for these tokens. Molmo 2 has such tokens around the patches, with their ordinary
    embeddings. In Molmo 2, these tokens and the patches attend to each other in both directions.
    """
    if media_rules(config).runs == "media":
        tokens: Sequence[int] = getattr(processor, "image_token_ids", ())
        return [token for token in tokens if token != image_token_id(config)]
    return getattr(config, "visual_indicator_token_ids", None) or ()


def open_encoder(model: Any, folder: Path) -> MediaEncoder | None:
    """Return a loaded model's encoder, or None for a text model. Encodes a small image and a small video as a
    test. Raises ModelError if the image fails. If the video fails, the model accepts no videos.
    """
    settings = open_media(folder, model.config)
    if settings is None:
        return None
    found = settings.prepare_image(sample_image(), ImageOptions(), lambda _: None, "the probe image")
    indicators = _indicators(model.config, open_processor(folder))
    encoder = MediaEncoder(model, torch.from_numpy(found.patches), indicators)
    if settings.video:
        try:
            found = settings.prepare_video(
                sample_video(), VideoOptions(), Access(), lambda _: None, "the probe video"
            )
            if encoder.check(torch.from_numpy(found.patches), "video") != encoder.num_deepstack:
                raise ModelError(f"{type(model).__name__} gives other layers' features for videos")
        except (InvalidMedia, ModelError) as error:
            _log.warning("videos are refused: %s", error.text)
            refuse_videos(folder, error.text)
    return encoder


def _marker(processor: object, modality: str) -> str:
    """Return an item's placeholder text in a prompt. Raises ModelError."""
    for name in _MARKERS:
        marker = getattr(processor, name.format(modality), None)
        if isinstance(marker, str) and marker:
            return marker
    raise ModelError(f"the processor {type(processor).__name__} names no token for {_one(modality)}")


def _one(modality: str) -> str:
    return "an image" if modality == "image" else f"a {modality}"


def _open_video(processor: Any, embeds: list[str]) -> tuple[str, str, str]:
    """Return a video's placeholder text, the prompt text for one video, and the reason why the model takes no
    videos. The reason is "" for a model that takes videos. Otherwise the placeholder and the prompt text are
    "".
    """
    if getattr(processor, "video_processor", None) is None:
        return "", "", "the model's processor takes no videos"
    try:
        marker = _marker(processor, "video")
        prompt, text, _ = _try_item(processor, "video", marker, video_arguments(*sample_video()))
    except ModelError as error:
        return "", "", error.text
    if not any(token in text for token in embeds):
        return "", "", f"the processor {type(processor).__name__} writes no placeholders for a video"
    return marker, prompt, ""


def _try_item(
    processor: Any, modality: str, marker: str, media: Mapping[str, object]
) -> tuple[str, str, Tensors]:
    """Return the prompt text for one item, the text that the processor writes for the item, and the item's
    tensors. The prompt text is `marker`, or `marker` between an item's start and end tokens. Raises
    ModelError.
    """
    ends = [str(getattr(processor, f"{modality}_{end}_token", "") or "") for end in ("start", "end")]
    reasons = []
    for prompt in dict.fromkeys((marker, f"{ends[0]}{marker}{ends[1]}")):
        try:
            return prompt, *process(processor, modality, prompt, media)
        except ModelError:
            raise
        except Exception as error:  # Processors may raise any exception.
            reasons.append(error)
    raise ModelError(
        f"the processor {type(processor).__name__} cannot process {_one(modality)}: "
        f"{in_one_line(reasons[0], 200)}"
    ) from reasons[0]


def sample_image() -> Image.Image:
    """Return a small image of noise."""
    return Image.fromarray(sample_frames()[0].transpose(1, 2, 0))


def sample_video() -> tuple[np.ndarray, dict[str, object]]:
    """Return the frames of `sample_frames`, and their metadata."""
    indices = list(range(_NUM_FRAMES))
    return sample_frames(), {"total_num_frames": _NUM_FRAMES, "fps": _FPS, "frames_indices": indices}


def sample_frames() -> np.ndarray:
    """Return a small video of noise, uint8 [t, 3, h, w]. The first two frames are equal, for models that drop
    the embeddings of unchanged patches.
    """
    width, height = _PROBE_SIZE
    frames = np.random.default_rng(0).integers(0, 255, (_NUM_FRAMES, height, width, 3), dtype=np.uint8)
    frames[1] = frames[0]
    return frames.transpose(0, 3, 1, 2)


def _pixels(processor: Any, tensors: Tensors) -> int:
    """Return the maximum number of pixels in a processed image. Without a limit, return the processed test
    image's number of pixels.
    """
    size = dict(getattr(getattr(processor, "image_processor", None), "size", None) or {})
    most = size.get("longest_edge") if "shortest_edge" in size else None
    if isinstance(most, int):
        return most
    return max(sum(values.size for name, (_, values) in tensors.items() if "pixel" in name) // CHANNELS, 1)
