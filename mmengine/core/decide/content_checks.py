"""Checks a request's prompt and media against the limits in the settings, before the request is logged."""

import math

import numpy as np

from mmengine.config import EngineConfig
from mmengine.errors import ErrorCode, FieldPath, InvalidRequest, shown
from mmengine.request import MediaItem

# Settings that limit the size of a media item. The value 0 means no limit.
_ENCODER_LIMITS = ("encoder_budget", "encoder_cache_size")
_ITEM_LIMITS = (*_ENCODER_LIMITS, "max_item_embeds")
_CHUNK_LIMITS = ("token_budget", "long_prefill_token_threshold")
PROMPT = FieldPath("prompt")


def check_content(
    prompt: np.ndarray, media: tuple[MediaItem, ...], config: EngineConfig, max_media: int | None = None
) -> None:
    """Raise InvalidRequest if the prompt (int32 [n]) or the media exceed a limit in the settings."""
    _check_prompt(prompt, config)
    if max_media is not None and len(media) > max_media:
        raise InvalidRequest(
            f"{len(media)} images and videos in one session; max_media_per_session is {max_media}"
        )
    if max_media is None and len(media) > config.max_media_per_request:
        raise InvalidRequest(
            f"{len(media)} images and videos in one request; max_media_per_request is "
            f"{config.max_media_per_request}"
        )
    _check_media(prompt, media, config)
    if config.whole_prompt:
        _check_whole_prompt(len(prompt), media, config)


def _check_whole_prompt(num_tokens: int, media: tuple[MediaItem, ...], config: EngineConfig) -> None:
    """Raise InvalidRequest if a single step cannot compute the whole prompt or encode all its media."""
    if num_tokens > (limit := _least(config, _CHUNK_LIMITS)):
        name = next(name for name in _CHUNK_LIMITS if getattr(config, name) == limit)
        raise InvalidRequest(
            f"prompt is too long: {num_tokens} tokens > {limit} maximum; this model computes a prompt in one "
            f"step, and {name} is {limit}: shorten the prompt, use smaller images, or raise {name}",
            code=ErrorCode.CONTEXT_LENGTH_EXCEEDED,
            path=PROMPT,
        )
    num_embeds = sum({item.mm_hash: item.num_embeds for item in media}.values())
    if num_embeds > _least(config, _ENCODER_LIMITS):
        what = "embeddings at once (this model computes a prompt in one step)"
        raise _too_large("the prompt", num_embeds, what, config, _ENCODER_LIMITS)


def _check_prompt(prompt: np.ndarray, config: EngineConfig) -> None:
    if prompt.dtype != np.int32 or prompt.ndim != 1:
        raise InvalidRequest(
            f"the prompt must be int32 [n], not {prompt.dtype} {list(prompt.shape)}", path=PROMPT
        )
    if not len(prompt):
        raise InvalidRequest("the prompt is empty: give it at least one token", path=PROMPT)
    if int(prompt.min()) < 0:
        raise InvalidRequest(
            f"the prompt holds the token id {int(prompt.min())}; ids are not negative", path=PROMPT
        )
    if len(prompt) >= config.max_model_len:
        raise InvalidRequest(
            f"prompt is too long: {len(prompt)} tokens > {config.max_model_len - 1} maximum; "
            f"max_model_len is {config.max_model_len} for prompt and answer: shorten the prompt, use smaller "
            "images, or raise max_model_len",
            code=ErrorCode.CONTEXT_LENGTH_EXCEEDED,
            path=PROMPT,
        )


def _check_media(prompt: np.ndarray, media: tuple[MediaItem, ...], config: EngineConfig) -> None:
    """Raise InvalidRequest for an item that exceeds an encoder limit. The largest chunk must have room for
    each item and each run that chunked prefill cannot split.
    """
    end, sizes = 0, dict[bytes, int]()
    is_whole = not config.split_media and not config.compat
    most = _least(config, _ITEM_LIMITS)
    most_in_run = _least(config, _CHUNK_LIMITS) if config.atomic_runs else math.inf
    most_tokens = _least(config, _CHUNK_LIMITS) if is_whole else math.inf
    for number, item in enumerate(media):
        if not isinstance(item, MediaItem) or not isinstance(item.mm_hash, bytes):
            raise InvalidRequest(f"media item {number} must be a MediaItem with a hash (bytes)")
        end, size = _check_runs(item, number, end, len(prompt))
        if size > most:
            raise _too_large(f"{item.modality} {number}", size, "embeddings", config, _ITEM_LIMITS)
        if (span := end - item.start) > most_tokens:
            what = "tokens at once (split_media is off)"
            raise _too_large(f"{item.modality} {number}", span, what, config, _CHUNK_LIMITS)
        if (longest := max(length for _, length in item.runs)) > most_in_run:
            what = "tokens at once (this model does not split an image)"
            raise _too_large(f"{item.modality} {number}", longest, what, config, _CHUNK_LIMITS)
        if sizes.setdefault(item.mm_hash, size) != size:
            raise InvalidRequest(f"{item.modality} {number} has the hash of another item, but not its size")


def _least(config: EngineConfig, names: tuple[str, ...]) -> float:
    """Return the smallest limit among the settings `names`. The value 0 means no limit."""
    return min((limit for name in names if (limit := getattr(config, name))), default=math.inf)


def _too_large(
    item: str, size: int, what: str, config: EngineConfig, names: tuple[str, ...]
) -> InvalidRequest:
    name, limit = next((name, limit) for name in names if 0 < (limit := getattr(config, name)) < size)
    return InvalidRequest(
        f"{item} needs {size} {what}, but {name} is {limit}; use smaller media, or raise {name}"
    )


def _check_runs(item: MediaItem, number: int, end: int, num_prompt: int) -> tuple[int, int]:
    """Check an item's runs, and return (end of the last run, total length). Runs must ascend without overlap,
    from `end` to at most the prompt's end.
    """
    size = 0
    if not item.runs:
        raise InvalidRequest(f"{item.modality} {number} has no embeddings in the prompt")
    for start, length in item.runs:
        if type(start) is not int or type(length) is not int:
            raise InvalidRequest(f"{item.modality} {number} has a run that is not a pair of integers")
        if start < end or length < 1 or start + length > num_prompt:
            raise InvalidRequest(
                f"{item.modality} {number} claims {shown(length)} prompt tokens from {shown(start)} on, "
                f"which overlap other media or exceed the prompt of {num_prompt} tokens"
            )
        end = start + length
        size += length
    return end, size
