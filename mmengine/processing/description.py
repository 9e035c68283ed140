"""Describes a model's prompts. Each model plugin passes a Description to the shared prompt processor. Also
reads generation_config.json.
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

    `placeholders`: maps the token id of a template's placeholder to the modality ("image" or "video"). A
    placeholder is a special token, or a text in `ChatTokenizer.marked`. `tokens`: a function that takes a
    placeholder's id and an item's loaded media, and returns the item's tokens. Placeholders among these
    tokens receive the item's embeddings in order. `encoder`: the encoder's fingerprint, a part of every pixel
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

    `version`: version of the prompt code; a new version may give other pixels or tokens. `max_positions`:
    number of positions in the model. `generation`: contents of generation_config.json. `eos_token_ids`: used
    if generation_config.json names no end tokens. `media`: None for a text-only model. `templates`: by
    modality, the template that replaces `template` for messages with such media. `remedy`: advice for a user
    whose media the model does not support.
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
    """Return the contents of generation_config.json, or {} without this file. Raises ModelError if the file
    is damaged.
    """
    name = "generation_config.json"
    return read_model_json(folder, name) if has_model_file(folder, name) else {}


def special_id(tokenizer: ChatTokenizer, name: str, who: str) -> int:
    """Return the id of the special token `name`. Raises ModelError for a missing token; the message names the
    caller (`who`).
    """
    if name not in tokenizer.special:
        raise ModelError(f"tokenizer.json has no special token {name}, which {who} needs")
    return tokenizer.special[name]
