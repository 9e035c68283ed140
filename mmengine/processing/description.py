"""A plugin's description of its prompts, which the shared processor reads: plain data, and a function that
returns a media item's tokens.
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


@dataclass(frozen=True, slots=True)
class MediaDescription:
    """Describes a model's media.

    `placeholders`: maps the id that stands for an item in a template (a special token's, or an id from the
    tokenizer's `marked`) to the modality ("image" or "video"). `tokens`: returns an item's tokens, given that
    id and the loaded media; its placeholder runs receive the item's embeddings in order. `encoder`: the
    encoder's fingerprint, which enters every pixel hash.
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

    `version`: the prompt code's version; changes when the same input would give other pixels or tokens.
    `max_positions`: number of positions in the model. `generation`: generation_config.json's content.
    `eos_token_ids`: used if that file names none. `media`: None for a text-only model. `templates`: maps a
    modality to the template that replaces `template` for messages with such media.
    """

    version: str
    tokenizer: ChatTokenizer
    template: ChatTemplate
    max_positions: int
    generation: dict
    eos_token_ids: tuple[int, ...]
    media: MediaDescription | None = None
    templates: Mapping[str, ChatTemplate] = field(default_factory=dict)


def read_generation(folder: Path) -> dict:
    """Return generation_config.json, or {} without the file. Raises ModelError."""
    name = "generation_config.json"
    return read_model_json(folder, name) if has_model_file(folder, name) else {}


def special_id(tokenizer: ChatTokenizer, name: str, who: str) -> int:
    """Return the special token id that `who` needs. Raises ModelError."""
    if name not in tokenizer.special:
        raise ModelError(f"tokenizer.json has no special token {name}, which {who} needs")
    return tokenizer.special[name]
