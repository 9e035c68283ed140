"""A loaded LoRA adapter, and a step's tokens that use the adapter."""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from mmengine.native.lora import LoraPart, PackedAdapter


@dataclass(frozen=True, slots=True)
class LoadedAdapter:
    """An adapter on a device. `text`: the decoder's additions. `vision`: the adapted tower; None if the
    adapter does not change the tower, or the model has no tower.
    """

    text: PackedAdapter | list[tuple[LoraPart, ...]]
    vision: object | None


class AdapterRows(NamedTuple):
    """Tokens in a step that are computed with an adapter."""

    adapter: LoadedAdapter
    rows: np.ndarray  # int32 [n], the tokens' indices in the batch.
