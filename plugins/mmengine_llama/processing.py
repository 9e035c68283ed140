"""Builds the processor for a text model's prompts."""

from pathlib import Path

from mmengine.checkpoint.model_files import lacks_projector
from mmengine.processing.chat.template import ChatTemplate
from mmengine.processing.chat.tokens import ChatTokenizer
from mmengine.processing.description import REMEDY, Description, read_generation
from mmengine.processing.processor import ChatProcessor
from mmengine_llama.config import read_config

VERSION = "llama-processing-1"  # Must change when the same input gives other tokens.
NO_PROJECTOR = "serve the model with its projector (--mmproj)"


def load_processor(model: Path) -> ChatProcessor:
    """Return the processor for the model in a folder or a GGUF file. Raises ModelError."""
    config, tokenizer = read_config(model), ChatTokenizer.of_folder(model)
    return ChatProcessor(
        Description(
            version=VERSION,
            tokenizer=tokenizer,
            template=ChatTemplate.of_folder(model, tokenizer, optional=True),  # Base models have no template.
            max_positions=config.text.max_positions,
            generation=read_generation(model),
            eos_token_ids=config.eos_token_ids,
            remedy=NO_PROJECTOR if lacks_projector(model) else REMEDY,
        )
    )
