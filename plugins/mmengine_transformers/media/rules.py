"""Reads from a hosted model's config which tokens stand for media, and what media need from the scheduler and
from attention. Imports no torch.
"""

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, NamedTuple

from mmengine.models.spec import RunKind

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

_IMAGE_FIELDS = ("image_token_id", "image_token_index", "image_patch_id")
_VIDEO_FIELDS = ("video_token_id", "video_token_index")


class MediaRules(NamedTuple):
    """What a model's media need from the scheduler and from attention.

    `runs`: which tokens see one another, in addition to causal attention. "run": the tokens in the same
    embedding run. "media": the tokens of all items in the prompt. "prompt": all prompt tokens. "": no tokens.
    `atomic_runs`: whether an embedding run must be computed in one step. `whole_prompt`: whether the whole
    prompt must be computed in one step. `only_windows`: whether `runs` applies only to layers with a window.
    """

    runs: RunKind = ""
    atomic_runs: bool = False
    whole_prompt: bool = False
    only_windows: bool = False


def media_rules(config: "PreTrainedConfig") -> MediaRules:
    """Return the rules for the model with this transformers config."""
    kind = config.model_type
    if kind == "gemma3":
        return MediaRules("run", atomic_runs=True)
    if kind == "gemma4":
        text = config.get_text_config()
        if getattr(text, "use_bidirectional_attention", None) == "vision":
            return MediaRules("run", atomic_runs=True, only_windows=True)
    if kind == "paligemma":
        return MediaRules("prompt", whole_prompt=True)
    if kind == "molmo2":
        return MediaRules("media", whole_prompt=True)
    return MediaRules()


def image_token_id(config: "PreTrainedConfig") -> int | None:
    """Return the token id that stands for an image's embeddings, or None for a text model."""
    return next(_integers(config, _IMAGE_FIELDS), None)


def video_token_id(config: "PreTrainedConfig") -> int | None:
    """Return the token id that stands for a video's embeddings, or None if the config names none."""
    return next(_integers(config, _VIDEO_FIELDS), None)


def media_token_ids(config: "PreTrainedConfig") -> frozenset[int]:
    """Return the ids of all tokens that media embeddings replace."""
    indicators = getattr(config, "visual_indicator_token_ids", None) or ()  # Ovis 2.
    return frozenset((*_integers(config, (*_IMAGE_FIELDS, *_VIDEO_FIELDS)), *indicators))


def _integers(config: "PreTrainedConfig", names: Iterable[str]) -> Iterator[int]:
    values = (getattr(config, name, None) for name in names)
    return (value for value in values if type(value) is int)
