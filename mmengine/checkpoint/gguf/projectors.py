"""Opens a GGUF text model's projector file (the vision tower), and checks that both files match."""

from pathlib import Path

from mmengine.checkpoint.gguf.config import PROJECTOR
from mmengine.checkpoint.gguf.container import Container, open_container
from mmengine.checkpoint.gguf.gemma3_vision import Gemma3Projector
from mmengine.checkpoint.gguf.projector import Projector
from mmengine.checkpoint.gguf.qwen2_vl import Qwen2VLProjector, Qwen25VLProjector
from mmengine.checkpoint.gguf.qwen3_vl import Qwen3VLProjector
from mmengine.checkpoint.gguf.smolvlm import SmolVLMProjector
from mmengine.errors import ModelError

FAMILIES = (Qwen2VLProjector, Qwen25VLProjector, Qwen3VLProjector, Gemma3Projector, SmolVLMProjector)
PROJECTORS: dict[str, type[Projector]] = {each.kind: each for each in FAMILIES}


def open_projector(path: Path, kinds: tuple[str, ...], hidden_size: int, text: Container) -> Projector:
    """Open the projector file `path` for the text model `text`.

    `kinds`: the projector types that fit the text model's architecture. `hidden_size`: the text model's
    embedding size. Raises ModelError for a missing or damaged file, and for another model's projector.
    """
    if not path.is_file():
        raise ModelError(
            f'there is no projector {path}; give a GGUF file on this machine, or the word "none"'
        )
    container = open_container(path)
    values, fields = container.metadata, container.fields
    if (kind := values.get("general.architecture")) != PROJECTOR:
        fields.fail(f"general.architecture is {kind!r:.60}; a projector's is {PROJECTOR}: give another file")
    if values.get("clip.has_vision_encoder") is not True:
        fields.fail("clip.has_vision_encoder is not true; give a projector for images")
    found = values.get("clip.vision.projector_type", values.get("clip.projector_type"))
    if found not in kinds:
        own = values.get("general.architecture"), text.metadata.get("general.architecture")
        fields.fail(
            f"its projector type is {found!r:.60}, but {text.path.name} is {own[1]} and needs "
            f"{' or '.join(kinds)}: it is the projector of another model"
        )
    projector = PROJECTORS[str(found)](container)
    if projector.out_hidden_size != hidden_size:
        fields.fail(
            f"it projects to {projector.out_hidden_size} values, but {text.path.name} has embeddings of "
            f"{hidden_size}: it is the projector of another model"
        )
    return projector
