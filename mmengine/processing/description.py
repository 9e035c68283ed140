"""What a plugin says of its prompts, for the processor of the floor: plain data, and what media become."""

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
    """What a model takes beside text.

    `placeholders`: modality ("image", "video") by the id of what stands for one item in a template, a special
    token or what the tokenizer has `marked`. `tokens`: what an item becomes there, given that id and what was
    loaded; its runs of placeholders are the embeddings in their order. `encoder`: a fingerprint of what
    computes these, which goes into every hash of pixels."""

    settings: MediaSettings
    placeholders: Mapping[int, str]
    tokens: Callable[[int, LoadedMedia], Iterable[Piece]]
    encoder: str

    @property
    def modalities(self) -> tuple[str, ...]:
        return tuple(self.placeholders.values())


@dataclass(frozen=True, slots=True)
class Description:
    """`version`: of the plugin's part in prompts; it changes when the same input would give other pixels or
    tokens. `max_positions`: tokens that the model has positions for. `generation`: what
    generation_config.json says. `eos_token_ids`: where that names none. `media`: None, a model of text
    alone. `templates`: by modality, in place of `template` for messages that hold some of it."""

    version: str
    tokenizer: ChatTokenizer
    template: ChatTemplate
    max_positions: int
    generation: dict
    eos_token_ids: tuple[int, ...]
    media: MediaDescription | None = None
    templates: Mapping[str, ChatTemplate] = field(default_factory=dict)


def read_generation(folder: Path) -> dict:
    """generation_config.json, {} where there is none. Raises ModelError."""
    name = "generation_config.json"
    return read_model_json(folder, name) if has_model_file(folder, name) else {}


def special_id(tokenizer: ChatTokenizer, name: str, who: str) -> int:
    """The id of a special token that `who` needs. Raises ModelError."""
    if name not in tokenizer.special:
        raise ModelError(f"tokenizer.json has no special token {name}, which {who} needs")
    return tokenizer.special[name]
