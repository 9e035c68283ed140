"""Reads metadata arrays that several architectures of GGUF files have."""

from mmengine.checkpoint.fields import Fields
from mmengine.checkpoint.gguf.container import StoredArray

SECTIONS = "rope.dimension_sections"


def rope_sections(fields: Fields) -> list[int]:
    """Return the numbers of rotary frequencies for time, height and width. Raises ModelError."""
    stored = fields.values.get(SECTIONS)
    if not isinstance(stored, StoredArray) or stored.count not in (3, 4):
        fields.fail(f"{fields.prefix}{SECTIONS} is {stored!r:.60}; three numbers are required")
    return [int(size) for size in stored.as_integers()[:3]]


def layer_flags(fields: Fields, name: str, num_layers: int) -> list[bool]:
    """Return the array `name` as booleans, one per layer. The file may store integers. Raises ModelError."""
    stored = fields.values.get(name)
    if not isinstance(stored, StoredArray) or stored.count < num_layers:
        fields.fail(f"{fields.prefix}{name} is {stored!r:.60}; {num_layers} truth values are required")
    flags = stored.as_flags() if stored.form == "?" else [value != 0 for value in stored.as_integers()]
    return [bool(flag) for flag in flags[:num_layers]]
