"""Describes Qwen3-VL's prompts and media to ChatProcessor, the processor for all models."""

from collections.abc import Iterator
from pathlib import Path

from mmengine.checkpoint.fingerprint import fingerprint
from mmengine.checkpoint.names import TensorNames
from mmengine.models.vision.config import VisionConfig
from mmengine.processing.chat.template import ChatTemplate
from mmengine.processing.chat.token_writer import Piece, Run
from mmengine.processing.chat.tokens import ChatTokenizer
from mmengine.processing.description import Description, MediaDescription, read_generation, special_id
from mmengine.processing.media.grids import GridSettings, ImageSettings, VideoSettings, read_grids
from mmengine.processing.media.loader import LoadedMedia
from mmengine.processing.media.patches import PatchSettings
from mmengine.processing.processor import ChatProcessor
from mmengine_qwen3_vl.config import read_config
from mmengine_qwen3_vl.names import NAMES

VERSION = "qwen3-vl-processing-1"  # Changes if an input results in other pixels or tokens than before.
NORMALISATION = {"image_mean": [0.5, 0.5, 0.5], "image_std": [0.5, 0.5, 0.5]}  # The tower's constants.
_IM_END = "<|im_end|>"


def load_processor(folder: Path) -> ChatProcessor:
    """Return the processor for the model in `folder`. Raises ModelError with the faulty file's name."""
    folder = Path(folder)
    config = read_config(folder)
    tokenizer = ChatTokenizer.of_folder(folder)
    pads = {config.image_token_id: "image", config.video_token_id: "video"}
    media = media_of(folder, config.vision, pads, tokenizer, NAMES)
    return ChatProcessor(
        Description(
            version=VERSION,
            tokenizer=tokenizer,
            template=ChatTemplate.of_folder(folder, tokenizer, media.modalities),
            max_positions=config.text.max_positions,
            generation=read_generation(folder),
            eos_token_ids=(tokenizer.special[_IM_END],) if _IM_END in tokenizer.special else (),
            media=media,
        )
    )


def media_of(
    folder: Path, vision: VisionConfig, pads: dict[int, str], tokenizer: ChatTokenizer, names: TensorNames
) -> MediaDescription:
    """Return the media description of Qwen3-VL, and of other models with the same media.

    `pads`: placeholder id -> modality. `names`: tensor names in the folder's files -> canonical names.
    """
    settings = read_grids(folder, _defaults(vision), NORMALISATION)
    start, end = (special_id(tokenizer, f"<|vision_{side}|>", "a Qwen3-VL") for side in ("start", "end"))

    def tokens(pad: int, loaded: LoadedMedia) -> Iterator[Piece]:
        """Yield an item's tokens. Each temporal patch of a video becomes a timestamp and the tokens of an
        image.
        """
        run = Run(pad, settings.patches.embeds(loaded.grid))
        if not loaded.timestamps:
            yield run
        for seconds in loaded.timestamps:
            yield from (f"<{seconds:.1f} seconds>", start, run, end)

    return MediaDescription(settings, pads, tokens, fingerprint(folder, names, prefix="visual."))


def _defaults(vision: VisionConfig) -> GridSettings:
    """Return default values for fields that the files omit."""
    return GridSettings(
        PatchSettings(vision.patch_size, vision.temporal_patch_size, vision.merge_size),
        ImageSettings(min_pixels=56 * 56, max_pixels=28 * 28 * 1280),
        VideoSettings(
            min_pixels=128 * 32 * 32,
            max_pixels=32 * 32 * 768,
            min_frames=4,
            max_frames=768,
            fps=2.0,
            do_sample_frames=True,
            cap_pixels_per_frame=False,
            max_video_tokens=768,
        ),
    )
