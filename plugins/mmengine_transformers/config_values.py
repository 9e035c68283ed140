"""Checks values in config.json before transformers builds anything from them."""

import re
from collections.abc import Iterator
from pathlib import Path

from mmengine.checkpoint.fields import Fields
from mmengine.checkpoint.quantisation import SUPPORTED, quantisation_of
from mmengine.models.config_reader import MAX_EXPERTS, MAX_LAYERS

_LAYERS = re.compile(r"(n|num)_(\w+_)?layers?|(encoder|decoder)_layers|depth")
_EXPERTS = re.compile(r"(n|num)_(\w+_)?experts")


def check_values(path: Path, values: dict[str, object]) -> None:
    """Raise ModelError for an unsupported quantisation, and for too many layers or experts. `values`: the
    JSON object in the file `path`.

    Each layer is a Python module, so an absurd number of layers would take all memory.
    """
    quantisation_of(Fields(values, path, ""))
    for fields in _objects(Fields(values, path, "")):
        if fields.prefix and fields.values.get("quantization_config") is not None:
            fields.fail(f"{fields.prefix}quantization_config must not be in a nested object; {SUPPORTED}")
        for name, value in fields.values.items():
            limit = MAX_LAYERS if _LAYERS.fullmatch(name) else MAX_EXPERTS if _EXPERTS.fullmatch(name) else 0
            if limit and isinstance(value, int) and value > limit:
                fields.fail(f"{fields.prefix}{name} is {repr(value)[:60]}; the limit is {limit:,}")


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
