"""Reads the media tokens and media rules from a transformers config. The rules are for the scheduler and
attention. This module does not import torch.
"""

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, NamedTuple

from mmengine.models.spec import RunKind

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

_IMAGE_FIELDS = ("image_token_id", "image_token_index", "image_patch_id")
_VIDEO_FIELDS = ("video_token_id", "video_token_index")


class MediaRules(NamedTuple):
    """A model's media rules for the scheduler and attention.

    An embedding run is a sequence of adjacent media tokens. `runs`: which tokens attend to one another in
    both directions. "run": the tokens within each embedding run. "media": the tokens of all items. "prompt":
    all prompt tokens. "": none. `atomic_runs`: whether a step must compute whole embedding runs.
    `whole_prompt`: whether a step must compute the whole prompt. `only_windows`: whether `runs` applies only
    to sliding-window layers.
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
    """Return the id of the placeholder token for images, or None for a text model."""
    return next(_integers(config, _IMAGE_FIELDS), None)


def video_token_id(config: "PreTrainedConfig") -> int | None:
    """Return the id of the placeholder token for videos, or None if the config has no such token."""
    return next(_integers(config, _VIDEO_FIELDS), None)


def media_token_ids(config: "PreTrainedConfig") -> frozenset[int]:
    """Return the ids of all placeholder tokens for media."""
    indicators = getattr(config, "visual_indicator_token_ids", None) or ()  # Ovis 2.
    return frozenset((*_integers(config, (*_IMAGE_FIELDS, *_VIDEO_FIELDS)), *indicators))


def _integers(config: "PreTrainedConfig", names: Iterable[str]) -> Iterator[int]:
    values = (getattr(config, name, None) for name in names)
    return (value for value in values if type(value) is int)
