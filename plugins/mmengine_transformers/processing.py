"""Describes a model's prompts to the shared processor."""

from pathlib import Path

from mmengine.checkpoint.model_files import read_model_json
from mmengine.processing.chat.template import ChatTemplate
from mmengine.processing.chat.tokens import ChatTokenizer
from mmengine.processing.description import Description, read_generation
from mmengine.processing.processor import ChatProcessor

VERSION = "transformers-processing-1"  # Changes when the same input would give other tokens.


def load_processor(folder: Path) -> ChatProcessor:
    """Return the processor for a text model's folder. Raises ModelError, which names the problem."""
    values, tokenizer = read_model_json(folder, "config.json"), ChatTokenizer.of_folder(folder)
    ends = values.get("eos_token_id")
    listed = ends if isinstance(ends, list) else [ends]
    return ChatProcessor(
        Description(
            version=VERSION,
            tokenizer=tokenizer,
            template=ChatTemplate.of_folder(folder, tokenizer, optional=True),
            max_positions=values.get("max_position_embeddings") or 4096,
            generation=read_generation(folder),
            eos_token_ids=tuple(each for each in listed if type(each) is int),
        )
    )
