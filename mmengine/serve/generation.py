"""transformers' generation keywords, as sampling parameters. Unknown ones are refused by name."""

from collections.abc import Mapping
from typing import Any

from mmengine.errors import InvalidRequest
from mmengine.request import SamplingParams
from mmengine.serve.options import make_sampling

DEFAULT_MAX_NEW_TOKENS = 256  # transformers' for this pipeline
DEFAULT_TOP_K = 50  # transformers' when it samples and nobody says otherwise

_RENAMED = {
    "max_new_tokens": "max_tokens",
    "min_new_tokens": "min_tokens",
    "num_return_sequences": "n",
    "repetition_penalty": "repetition_penalty",
    "seed": "seed",
}
_WHEN_SAMPLING = ("temperature", "top_k", "top_p", "min_p")
# Accepted where they ask for what happens anyway.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "num_beams": (None, 1),
    "num_beam_groups": (None, 1),
    "length_penalty": (None, 1.0),
    "early_stopping": (None, False),
    "no_repeat_ngram_size": (None, 0),
    "encoder_repetition_penalty": (None, 1.0),
    "typical_p": (None, 1.0),
    "epsilon_cutoff": (None, 0.0),
    "eta_cutoff": (None, 0.0),
    "output_scores": (None, False),
    "output_logits": (None, False),
    "output_attentions": (None, False),
    "output_hidden_states": (None, False),
    "return_dict_in_generate": (None, False),
    "use_cache": (None, True),
}
_IGNORED = ("tokenizer", "pad_token_id", "bos_token_id", "transformers_version")
_KNOWN = (
    *_RENAMED,
    *_WHEN_SAMPLING,
    *_NEUTRAL,
    *_IGNORED,
    "do_sample",
    "eos_token_id",
    "generation_config",
    "stop_strings",
)
_FROM_CHECKPOINT = ("do_sample", "max_new_tokens", "min_new_tokens", "repetition_penalty", *_WHEN_SAMPLING)


def is_generation_option(name: str) -> bool:
    """Whether `name` is a generation keyword that this module takes or knows how to refuse."""
    return name in _KNOWN or name in ("max_length", "min_length", "max_time")


def sampling_from_generation(given: Mapping[str, Any], defaults: Mapping[str, Any]) -> SamplingParams:
    """Sampling for generation keywords `given` by the caller over `defaults`, the checkpoint's
    generation_config. As in transformers: greedy unless do_sample, which turns on top_k 50 where
    nobody sets it. Raises InvalidRequest."""
    given = _unfold_config(given)
    _refuse_unknown(given)
    values: dict[str, Any] = {"max_new_tokens": DEFAULT_MAX_NEW_TOKENS, "top_k": DEFAULT_TOP_K}
    values.update({name: defaults[name] for name in _FROM_CHECKPOINT if defaults.get(name) is not None})
    values.update({name: value for name, value in given.items() if value is not None})

    options = {new: values[old] for old, new in _RENAMED.items() if old in values}
    if values.get("do_sample"):
        options["temperature"] = values.get("temperature", 1.0)
        options.update({name: values[name] for name in _WHEN_SAMPLING if name in values})
    elif options.get("n", 1) != 1:
        raise InvalidRequest("num_return_sequences above 1 needs do_sample=True: greedy answers are alike")
    if "stop_strings" in values:
        options["stop"] = _strings(values["stop_strings"])
    if "eos_token_id" in given and given["eos_token_id"] is not None:
        options["ignore_eos"] = True
        options["stop_token_ids"] = _ids(given["eos_token_id"])
    return make_sampling(options)


def _unfold_config(given: Mapping[str, Any]) -> dict[str, Any]:
    """A generation_config (a dict, or transformers' object) below the other keywords."""
    config = given.get("generation_config")
    if config is None:
        return dict(given)
    if not isinstance(config, Mapping):
        if not hasattr(config, "to_diff_dict"):
            raise InvalidRequest("generation_config must be a dict or a GenerationConfig")
        config = config.to_diff_dict()
    return {**config, **{name: value for name, value in given.items() if name != "generation_config"}}


def _refuse_unknown(given: Mapping[str, Any]) -> None:
    for name, value in given.items():
        if name in ("max_length", "min_length") and value is not None:
            short = "max_new_tokens" if name == "max_length" else "min_new_tokens"
            raise InvalidRequest(f"{name} counts the prompt too and is not supported; use {short}")
        if name in _NEUTRAL and value not in _NEUTRAL[name]:
            raise InvalidRequest(f"{name}={value!r} is not supported; leave it out")
        if name not in _KNOWN and value is not None:
            raise InvalidRequest(f"unknown generation option {name!r}; known are {', '.join(sorted(_KNOWN))}")


def _strings(value: Any) -> tuple[str, ...]:
    return (value,) if isinstance(value, str) else tuple(value)


def _ids(value: Any) -> tuple[int, ...]:
    return (value,) if isinstance(value, int) else tuple(value)
