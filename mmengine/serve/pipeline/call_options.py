"""Separates a pipeline call's keywords into generation, processing and chat template options.

A keyword of transformers' pipeline has the same effect here as in transformers.
"""

import warnings
from collections.abc import Callable, Mapping

from mmengine.errors import FIELD, FieldPath, InvalidRequest
from mmengine.serve.pipeline.generation_keywords import REFUSED, Keywords
from mmengine.serve.pipeline.generation_options import is_generation_option, refuse

# Keywords of the pipeline call itself: transformers' keywords, and keywords that only this pipeline has.
OWN = frozenset(
    {
        "generate_kwargs",
        "max_new_tokens",
        "return_full_text",
        "return_tensors",
        "return_text",
        "return_type",
        "stop_sequence",
        "continue_final_message",
        "skip_special_tokens",
        "clean_up_tokenization_spaces",
        "processor_kwargs",
        "batch_size",
        "num_workers",
        "timeout",
        "add_generation_prompt",
        "streamer",
        "seed",
        "logprobs",
        "response_format",
        "grammar",
    }
)
_HOLDS_IN_A_CALL = frozenset({"max_new_tokens", "streamer", "seed", "logprobs"})
_OF_IMAGES = ("min_pixels", "max_pixels")
_OF_VIDEOS = ("fps", "num_frames", "do_sample_frames", "cap_pixels_per_frame")
_OF_BOTH = ("size", "do_resize")
_NESTED = ("images_kwargs", "videos_kwargs")
# Processing options that transformers lacks, and `video_metadata`. In a call, these options are keys of
# `processor_kwargs`, not direct keywords.
_OURS = (
    "local_files",
    "urls",
    "video_metadata",
    "total_pixels",
    "total_min_pixels",
    "resized_height",
    "resized_width",
    "nframes",
    "video_start",
    "video_end",
    "sample_fps",
    "raw_fps",
)
# Options of transformers' processors that `settle_processing` accepts and ignores.
_ALWAYS = frozenset(
    {
        "add_special_tokens",
        "audio_kwargs",
        "device",
        "disable_grouping",
        "max_frames",
        "max_length",
        "min_frames",
        "padding",
        "padding_side",
        "pad_to_multiple_of",
        "return_attention_mask",
        "return_dict",
        "return_mm_token_type_ids",
        "return_tensors",
        "return_token_type_ids",
        "tokenize",
    }
)
_ONLY = {"truncation": False, "do_convert_rgb": True, "do_rescale": True, "do_normalize": True}
_TEXT_KWARGS = ("text_kwargs", "common_kwargs")


def settle_generation(given: Keywords, defaults: Keywords) -> dict[str, object]:
    """Return a call's generation keywords, merged over the pipeline's defaults.

    As in transformers, most generation keywords must be in `generate_kwargs`. Only keywords in
    _HOLDS_IN_A_CALL may also be direct keywords. Other supported direct keywords are ignored with a warning.
    A generation_config replaces the pipeline's defaults.
    """
    beside = {
        name: value for name, value in given.items() if is_generation_option(name) and value is not None
    }
    refuse({name: value for name, value in beside.items() if name in REFUSED})
    idle = sorted(name for name in beside if name not in _HOLDS_IN_A_CALL and name not in REFUSED)
    if idle:
        warnings.warn(
            f"{', '.join(idle)}: as in transformers, generation options have no effect as call keywords; "
            "pass them as generate_kwargs={…}, or to the constructor",
            stacklevel=4,
        )
    inner = given.get("generate_kwargs", defaults.get("generate_kwargs")) or {}
    if given.get("max_new_tokens") is not None and "max_new_tokens" in inner:
        raise InvalidRequest("max_new_tokens is given twice, by itself and in generate_kwargs")
    generation = {} if inner.get("generation_config") is not None else _generation(defaults)
    generation.update(inner)
    generation.update({name: beside[name] for name in _HOLDS_IN_A_CALL if name in beside})
    stop = given.get("stop_sequence", defaults.get("stop_sequence"))
    if stop is not None:
        generation["stop_strings"] = stop
    return generation


def _generation(options: Keywords) -> dict[str, object]:
    return {name: value for name, value in options.items() if is_generation_option(name)}


def settle_processing(options: Keywords) -> dict[str, object]:
    """Return the `media_options` that the processing keywords and `processor_kwargs` request.

    Raises InvalidRequest.
    """
    inner = options.get("processor_kwargs") or {}
    if not isinstance(inner, Mapping):
        raise InvalidRequest(f"processor_kwargs must be a dict, not a {type(inner).__name__}")
    flat = {**inner, **{name: value for name, value in options.items() if is_processing_option(name)}}
    found: dict[str, object] = {}
    nested_in: dict[str, dict[str, object]] = {name: {} for name in _NESTED}
    for name, value in flat.items():
        if name in (*_OF_IMAGES, *_OF_BOTH):
            nested_in["images_kwargs"][name] = value
        if name in (*_OF_VIDEOS, *_OF_BOTH):
            nested_in["videos_kwargs"][name] = value
        if name in _OURS:
            found[name] = value
    for name in (*_NESTED, *_TEXT_KWARGS):
        nested = flat.get(name) or {}
        if not isinstance(nested, Mapping):
            raise InvalidRequest(
                f"{FIELD} must be a dict, not a {type(nested).__name__}", path=FieldPath(name)
            )
        kept = {key: value for key, value in nested.items() if _asks(key, value)}
        if name in _NESTED:
            nested_in[name].update(kept)
        elif kept:
            raise InvalidRequest(
                f"{FIELD}: {next(iter(kept))!r:.80} is not supported; leave it out", path=FieldPath(name)
            )
    known = (*_OF_IMAGES, *_OF_VIDEOS, *_OF_BOTH, *_NESTED, *_TEXT_KWARGS, *_OURS)
    for name, value in flat.items():
        if name not in known and _asks(name, value):
            raise InvalidRequest(f"{name}={value!r:.80} is not supported: {_why(name)}")
    return {**found, **{name: values for name, values in nested_in.items() if values}}


def _asks(name: str, value: object) -> bool:
    """Return whether a processing option changes the default processing."""
    return value is not None and name not in _ALWAYS and not (name in _ONLY and value is _ONLY[name])


def _why(name: str) -> str:
    if name == "truncation":
        return "prompts are not cut; shorten the prompt"
    return "the checkpoint determines how prompts and pixels are prepared; leave it out"


_PIXELS = ("image_mean", "image_std", "rescale_factor", "resample", "crop_size", "do_center_crop", "do_pad")
_FIXED = ("patch_size", "temporal_patch_size", "merge_size", "max_video_tokens", "default_to_square")


def is_processing_option(name: str) -> bool:
    """Return whether transformers' processors have a keyword `name`."""
    known = (*_OF_IMAGES, *_OF_VIDEOS, *_OF_BOTH, *_NESTED, *_TEXT_KWARGS, *_ONLY, *_PIXELS, *_FIXED)
    return name in known or name in _ALWAYS


def settle_template(options: Keywords, read: frozenset[str]) -> dict[str, object]:
    """Return the keywords for the chat template: all except pipeline, generation and processing options.

    `read` has the variable names that the model's template reads.
    """
    found = {
        name: value
        for name, value in options.items()
        if value is not None
        and name not in OWN
        and not is_generation_option(name)
        and not is_processing_option(name)
    }
    if "tools" in found:
        found["tools"] = [_schema(tool) if callable(tool) else tool for tool in found["tools"]] or None
    known = {*read, "tools", "documents", "chat_template"}
    idle = sorted(str(name) for name in found if name not in known)
    if idle and "chat_template" not in found:
        warnings.warn(
            f"{', '.join(idle)[:200]}: neither the pipeline nor the chat template has this option; "
            "it has no effect",
            stacklevel=4,
        )
    return found


def _schema(tool: Callable[..., object]) -> object:
    """Return the JSON schema that transformers makes from a function's docstring and annotations."""
    try:
        from transformers.utils import get_json_schema
    except ImportError:
        raise InvalidRequest("a tool that is a function needs transformers; give its JSON schema") from None
    try:
        return get_json_schema(tool)
    except Exception as error:
        raise InvalidRequest(f"a tool cannot be described: {str(error)[:300]}") from None
