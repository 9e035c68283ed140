"""Reads the options of the rotary embedding from a config.json."""

from dataclasses import dataclass

from mmengine.checkpoint.fields import Fields
from mmengine.errors import shown

PLAIN = ("default", "mrope")  # "mrope" is an old name for "default" with sections.


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Options of the rotary embedding.

    `kind`: how frequencies are scaled. `sections`: the numbers of frequencies for a token's time, height and
    width positions. Their sum is head_dim / 2. None: all frequencies use the time position. `interleaved`:
    whether the frequencies of time, height and width alternate; otherwise the sections are consecutive.
    """

    theta: float
    kind: str = "default"  # "default", "linear" or "llama3".
    factor: float = 1.0
    low_freq_factor: float = 1.0  # This field and the next two are only for "llama3".
    high_freq_factor: float = 4.0
    original_positions: int = 8192
    sections: tuple[int, int, int] | None = None
    interleaved: bool = False


def read_rope(layer: Fields, head_dim: int) -> RopeConfig:
    """Read `rope_parameters` (transformers 5), or `rope_scaling` and `rope_theta` (older versions).

    Raises ModelError for invalid values and for an unsupported kind of scaling.
    """
    modern = layer.values.get("rope_parameters") is not None
    rope = layer.child("rope_parameters" if modern else "rope_scaling", optional=True)
    kind = rope.values.get("rope_type", rope.values.get("type", "default"))
    if kind not in (*PLAIN, "linear", "llama3"):
        rope.fail(f"{rope.prefix}rope_type is {shown(kind)}; supported are default, mrope, linear and llama3")
    for fields in (rope, layer):
        if fields.number("partial_rotary_factor", 1.0) != 1.0:
            fields.fail(f"{fields.prefix}partial_rotary_factor is not 1, which is not supported")
    sections = _sections(rope, head_dim)
    theta = (rope if rope.values.get("rope_theta") is not None else layer).number("rope_theta", 10000.0)
    interleaved = rope.flag("mrope_interleaved", False)
    if kind in PLAIN:
        return RopeConfig(theta, sections=sections, interleaved=interleaved)
    if "factor" not in rope.values:
        rope.fail(f"{rope.prefix}factor is missing; rope_type {kind} needs it")
    low, high = rope.number("low_freq_factor", 1.0), rope.number("high_freq_factor", 4.0)
    if kind == "llama3" and low >= high:
        rope.fail(f"{rope.prefix}low_freq_factor {low} must be less than high_freq_factor {high}")
    return RopeConfig(
        theta,
        kind=kind,
        factor=rope.number("factor", 1.0),
        low_freq_factor=low,
        high_freq_factor=high,
        original_positions=rope.integer("original_max_position_embeddings", 1, 2**24, 8192),
        sections=sections,
        interleaved=interleaved,
    )


def _sections(rope: Fields, head_dim: int) -> tuple[int, int, int] | None:
    if rope.values.get("mrope_section") is None:
        return None
    sections = rope.integers("mrope_section", None, 0, 512, 3)
    if len(sections) != 3 or sum(sections) != head_dim // 2:
        rope.fail(
            f"{rope.prefix}mrope_section is {list(sections)}; it must be three numbers whose sum is half of "
            f"head_dim {head_dim}"
        )
    return sections
