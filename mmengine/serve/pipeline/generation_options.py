"""Converts transformers' generation keywords to this engine's Options."""

from collections.abc import Iterable, Mapping
from typing import Any

from mmengine.errors import FIELD, FieldPath, InvalidRequest
from mmengine.serve.pipeline.generation_keywords import (
    CHANGES_NOTHING,
    FILTERS,
    REFUSED,
    TAKEN,
    WHEN_SAMPLING,
    Keywords,
)
from mmengine.serve.prompt.options import Options, make_sampling

DEFAULT_MAX_NEW_TOKENS = 256  # transformers' default for this pipeline
DEFAULT_TOP_K = 50  # transformers' default when it samples

_RENAMED = {
    "max_new_tokens": "max_tokens",
    "min_new_tokens": "min_tokens",
    "num_return_sequences": "n",
    **{
        name: name
        for name in ("repetition_penalty", "no_repeat_ngram_size", "suppress_tokens", "logprobs", "seed")
    },
}
_FROM_CHECKPOINT = (
    "do_sample",
    "max_new_tokens",
    "max_length",
    "min_new_tokens",
    "repetition_penalty",
    *WHEN_SAMPLING,
)


def is_generation_option(name: str) -> bool:
    """Return whether `name` is a known generation keyword, supported or not."""
    return name in TAKEN or name in CHANGES_NOTHING or name in REFUSED


def options_from_generation(
    given: Keywords, defaults: Keywords, eos_token_ids: Iterable[int] = ()
) -> Options:
    """Return the options for the caller's keywords `given` and the checkpoint's generation_config `defaults`.

    The caller's keywords override `defaults`. As in transformers, decoding is greedy without do_sample. With
    do_sample, top_k is 50 by default. Raises InvalidRequest.
    """
    given = {name: value for name, value in _unfold_config(given).items() if value is not None}
    values: dict[str, Any] = {"top_k": DEFAULT_TOP_K}
    values.update({name: defaults[name] for name in _FROM_CHECKPOINT if defaults.get(name) is not None})
    values.update(given)
    refuse(values)
    if "max_length" not in values:
        values.setdefault("max_new_tokens", DEFAULT_MAX_NEW_TOKENS)

    options = {new: values[old] for old, new in _RENAMED.items() if old in values}
    if values.get("do_sample"):
        options["temperature"] = values.get("temperature", 1.0)
        options.update({name: values[name] for name in WHEN_SAMPLING if name in values})
    elif options.get("n", 1) != 1:
        raise InvalidRequest("num_return_sequences above 1 needs do_sample=True: greedy answers are alike")
    if "stop_strings" in values:
        options["stop"] = _strings(values["stop_strings"])
        options["stop_in_min_tokens"] = True
    if "eos_token_id" in given:
        eos_token_ids = _ids(given["eos_token_id"])
        options["ignore_eos"] = True
        options["stop_token_ids"] = tuple(token for token in eos_token_ids if token != -1)
    options.update(_sequences(values, {(token,) for token in eos_token_ids}))
    return _with_lengths(values, options)


def refuse(given: Keywords) -> None:
    """Raise InvalidRequest for the first keyword that is unknown or has an unsupported value."""
    for name, value in given.items():
        if not is_generation_option(name):
            raise InvalidRequest(
                f"unknown generation option {name!r:.80}; known are {', '.join(sorted(TAKEN))}"
            )
        if name in REFUSED:
            neutral, use = REFUSED[name]
            asks = name not in FILTERS or given.get("do_sample")
            if asks and not any(_same(value, one) for one in (None, *neutral)):
                raise InvalidRequest(f"{name}={value!r:.80} is not supported; {use}")


def _same(value: object, other: object) -> bool:
    return type(value) in (bool, int, float, str, list, tuple, dict) and value == other


def _with_lengths(values: Keywords, options: dict[str, object]) -> Options:
    """Return Options with max_time, max_length and min_length. The lengths include the prompt."""
    max_length = 0
    if "max_new_tokens" not in values:
        max_length = options["max_tokens"] = _whole(values, "max_length", 1)
    least, most = options.get("min_tokens"), options["max_tokens"]
    if isinstance(least, int) and isinstance(most, int):
        options["min_tokens"] = min(least, max(1, most))
    seconds = values.get("max_time", 0)
    if isinstance(seconds, bool) or not isinstance(seconds, (int, float)) or not seconds >= 0:
        raise InvalidRequest(f"max_time must be a number of seconds, not {seconds!r:.80}")
    if "max_time" in values and not seconds:  # as in transformers, max_time 0 gives one token
        options["max_tokens"], max_length = 1, 0
        options.pop("min_tokens", None)
    # min_new_tokens takes precedence over min_length.
    min_length = _whole(values, "min_length", 0) if "min_tokens" not in options else 0
    return Options(
        make_sampling(options), deadline_s=float(seconds), max_length=max_length, min_length=min_length
    )


def _whole(values: Keywords, name: str, least: int) -> int:
    value = values.get(name, 0)
    if type(value) is not int or not (least <= value <= 10**7 or name not in values):
        raise InvalidRequest(
            f"{FIELD} must be an integer from {least} to {10**7}, not {value!r:.80}", path=FieldPath(name)
        )
    return value


def _sequences(values: Keywords, ends: set[tuple[int, ...]]) -> dict[str, object]:
    """Return sequence_bias as pairs, and bad_words_ids without end-of-sequence tokens. A sequence with the
    bias -inf becomes a bad word.
    """
    found: dict[str, object] = {}
    banned: list[tuple[int, ...]] = []
    if "bad_words_ids" in values:
        words = values["bad_words_ids"]
        if not isinstance(words, (list, tuple)) or not words or not all(map(_is_sequence, words)):
            raise InvalidRequest("bad_words_ids must be a non-empty list of lists of token ids")
        banned = [tuple(word) for word in words if tuple(word) not in ends]
    if "sequence_bias" in values:
        given = values["sequence_bias"]
        pairs = list(given.items()) if isinstance(given, Mapping) else given
        if not isinstance(pairs, (list, tuple)) or not pairs or not all(map(_is_biased, pairs)):
            raise InvalidRequest("sequence_bias must be a list of pairs: token ids, and a number")
        found["sequence_bias"] = [(tuple(word), bias) for word, bias in pairs if bias != float("-inf")]
        banned += [tuple(word) for word, bias in pairs if bias == float("-inf")]
    return {**found, "bad_words_ids": banned}


def _is_sequence(value: object) -> bool:
    return isinstance(value, (list, tuple)) and bool(value) and all(type(token) is int for token in value)


def _is_biased(pair: object) -> bool:
    if not isinstance(pair, (list, tuple)) or len(pair) != 2:
        return False
    return _is_sequence(pair[0]) and type(pair[1]) in (int, float)


def _unfold_config(given: Keywords) -> dict[str, object]:
    """Return the values in generation_config (a dict or a transformers object), overridden by direct
    keywords.
    """
    config = given.get("generation_config")
    if config is None:
        return dict(given)
    if not isinstance(config, Mapping):
        if not hasattr(config, "to_diff_dict"):
            raise InvalidRequest("generation_config must be a dict or a GenerationConfig")
        config = {name: value for name, value in config.to_diff_dict().items() if name[0] != "_"}
    return {**config, **{name: value for name, value in given.items() if name != "generation_config"}}


def _strings(value: str | Iterable[str]) -> tuple[str, ...]:
    return (value,) if isinstance(value, str) else tuple(value)


def _ids(value: int | Iterable[int]) -> tuple[int, ...]:
    return (value,) if isinstance(value, int) else tuple(value)
