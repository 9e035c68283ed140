"""A LoRA adapter as a model computes with it, and who computes with which in a step."""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from mmengine.native.lora import LoraPart, PackedAdapter


@dataclass(frozen=True, slots=True)
class LoadedAdapter:
    """`text`: what the decoder that made it adds. `vision`: the tower with it; None where it leaves that
    alone, or there is none."""

    text: PackedAdapter | list[tuple[LoraPart, ...]]
    vision: object | None


class AdapterRows(NamedTuple):
    """Tokens of a step that are computed with an adapter."""

    adapter: LoadedAdapter
    rows: np.ndarray  # int32 [n], their places in the batch
