"""Checks values in config.json before transformers builds anything from them."""

import re
from collections.abc import Iterator
from pathlib import Path

from mmengine.checkpoint.fields import Fields
from mmengine.checkpoint.quantisation import SUPPORTED, quantisation_of
from mmengine.models.config_reader import MAX_EXPERTS, MAX_LAYERS

_LAYERS = re.compile(r"(n|num)_(\w+_)?layers?|(encoder|decoder)_layers|depth")
_EXPERTS = re.compile(r"(n|num)_(\w+_)?experts")
_POSITIONS = re.compile(r"max_position_embeddings|n_positions|max_seq_len")
MAX_POSITIONS, MAX_LABELS = 2**30, 10_000
MAX_SIDE, MAX_SEQUENCE = 2**14, 2**16
_SIDES = frozenset(["height", "width"])
_SEQUENCE = re.compile(r"(image|audio|video)_seq_len(gth)?|num_(image|video|query)_tokens")
# A config must not choose an implementation, because transformers may download its code.
_IMPLEMENTATION = re.compile(r"_?(attn|experts)_implementation(_internal)?")


def check_values(path: Path, values: dict[str, object]) -> None:
    """Raise ModelError for an unsupported quantisation, and for too many layers, experts, positions or
    labels. `values`: the JSON object in the file `path`.

    Each layer is a Python module, and each label is a text. An absurd number would take all memory.
    """
    quantisation_of(Fields(values, path, ""))
    for fields in _objects(Fields(values, path, "")):
        if fields.prefix and fields.values.get("quantization_config") is not None:
            fields.fail(f"{fields.prefix}quantization_config must not be in a nested object; {SUPPORTED}")
        for name, value in fields.values.items():
            _check_limit(fields, name, _limit_of(name))
            if _POSITIONS.fullmatch(name) and isinstance(value, int) and value < 1:
                fields.fail(f"{fields.prefix}{name} is {repr(value)[:60]}; it must be at least 1")


def check_processor_values(path: Path, values: dict[str, object]) -> None:
    """Raise ModelError for image sizes and numbers of tokens above the limits. `values`: the JSON object in
    the processor's file `path`. Opening a processor creates and resizes a sample image, so sizes are checked
    first.
    """
    for fields in _objects(Fields(values, path, "")):
        for name in fields.values:
            limit = MAX_SIDE if name in _SIDES else MAX_SEQUENCE if _SEQUENCE.fullmatch(name) else 0
            _check_limit(fields, name, limit)


def _check_limit(fields: Fields, name: str, limit: int) -> None:
    """Raise ModelError for a number above `limit`. 0 means no limit."""
    value = fields.values[name]
    if limit and isinstance(value, int) and value > limit:
        fields.fail(f"{fields.prefix}{name} is {repr(value)[:60]}; the limit is {limit:,}")


def _limit_of(name: str) -> int:
    """Return the largest value of a field, or 0 for a field without a limit."""
    patterns = {_LAYERS: MAX_LAYERS, _EXPERTS: MAX_EXPERTS, _POSITIONS: MAX_POSITIONS}
    found = (limit for pattern, limit in patterns.items() if pattern.fullmatch(name))
    return MAX_LABELS if name == "num_labels" else next(found, 0)


def without_implementations(values: dict[str, object]) -> dict[str, object]:
    """Return a config without names of attention or expert implementations."""
    return {
        name: without_implementations(value) if isinstance(value, dict) else value
        for name, value in values.items()
        if not _IMPLEMENTATION.fullmatch(name)
    }


def _objects(fields: Fields) -> Iterator[Fields]:
    """Yield the object and every object nested in it, except `quantization_config`."""
    found = [fields]
    while found:
        each = found.pop()
        yield each
        found += [
            Fields(value, each.path, f"{each.prefix}{name}.")
            for name, value in each.values.items()
            if isinstance(value, dict) and name != "quantization_config"
        ]
