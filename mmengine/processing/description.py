"""The description of a model's prompts, which each model plugin gives to the shared processor: plain data,
and a function that returns an image's or a video's tokens. Also reads generation_config.json.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from mmengine.checkpoint.model_files import has_model_file, read_model_json
from mmengine.errors import ModelError
from mmengine.processing.chat.template import ChatTemplate
from mmengine.processing.chat.token_writer import Piece
from mmengine.processing.chat.tokens import ChatTokenizer
from mmengine.processing.media.loader import LoadedMedia
from mmengine.processing.media.settings import MediaSettings

REMEDY = "use another model"


@dataclass(frozen=True, slots=True)
class MediaDescription:
    """Describes a model's media.

    `placeholders`: token id that stands for an item in a template -> modality ("image" or "video"). The id
    belongs to a special token, or is in the tokenizer's `marked`. `tokens`: a function that returns an item's
    tokens, given the placeholder's id and the loaded media. The runs of placeholders among these tokens
    receive the item's embeddings in order. `encoder`: the encoder's fingerprint, which enters every pixel
    hash.
    """

    settings: MediaSettings
    placeholders: Mapping[int, str]
    tokens: Callable[[int, LoadedMedia], Iterable[Piece]]
    encoder: str

    @property
    def modalities(self) -> tuple[str, ...]:
        return tuple(self.placeholders.values())


@dataclass(frozen=True, slots=True)
class Description:
    """Describes a model's prompts.

    `version`: the version of the prompt code, which changes when some input would give other pixels or tokens
    than before. `max_positions`: number of positions in the model. `generation`: contents of
    generation_config.json. `eos_token_ids`: used if generation_config.json names no end tokens. `media`: None
    for a text-only model. `templates`: modality -> template that replaces `template` for messages with media
    of this modality. `remedy`: what a user can do about media that the model does not take.
    """

    version: str
    tokenizer: ChatTokenizer
    template: ChatTemplate
    max_positions: int
    generation: dict
    eos_token_ids: tuple[int, ...]
    media: MediaDescription | None = None
    templates: Mapping[str, ChatTemplate] = field(default_factory=dict)
    remedy: str = REMEDY


def read_generation(folder: Path) -> dict:
    """Return the contents of generation_config.json, or {} without this file. Raises ModelError."""
    name = "generation_config.json"
    return read_model_json(folder, name) if has_model_file(folder, name) else {}


def special_id(tokenizer: ChatTokenizer, name: str, who: str) -> int:
    """Return the id of the special token `name`. `who`: the code that needs the token, named in the
    ModelError if the token is missing.
    """
    if name not in tokenizer.special:
        raise ModelError(f"tokenizer.json has no special token {name}, which {who} needs")
    return tokenizer.special[name]
