"""Describes the prompts and media of Qwen3.5 to the shared processor. Images, videos, placeholders and
timestamps are the same as in Qwen3-VL.
"""

from pathlib import Path

from mmengine.processing.chat.template import ChatTemplate
from mmengine.processing.chat.tokens import ChatTokenizer
from mmengine.processing.description import Description, read_generation
from mmengine.processing.processor import ChatProcessor
from mmengine_qwen3_5.config import read_config
from mmengine_qwen3_5.names import NAMES
from mmengine_qwen3_vl.processing import media_of

VERSION = "qwen3-5-processing-1"  # Changes if an input results in other pixels or tokens than before.
_IM_END = "<|im_end|>"


def load_processor(folder: Path) -> ChatProcessor:
    """Return the processor for the model in `folder`. Raises ModelError, which names the file at fault."""
    config, tokenizer = read_config(folder), ChatTokenizer.of_folder(folder)
    media = None
    if config.vision is not None:
        pads = {config.image_token_id: "image", config.video_token_id: "video"}
        media = media_of(folder, config.vision, pads, tokenizer, NAMES)
    modalities = media.modalities if media is not None else ()
    return ChatProcessor(
        Description(
            version=VERSION,
            tokenizer=tokenizer,
            template=ChatTemplate.of_folder(folder, tokenizer, modalities, optional=True),
            max_positions=config.text.max_positions,
            generation=read_generation(folder),
            eos_token_ids=(tokenizer.special[_IM_END],) if _IM_END in tokenizer.special else (),
            media=media,
        )
    )
