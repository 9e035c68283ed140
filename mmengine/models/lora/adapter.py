"""Defines a loaded LoRA adapter, and which tokens in a step use an adapter."""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from mmengine.native.lora import LoraPart, PackedAdapter


@dataclass(frozen=True, slots=True)
class LoadedAdapter:
    """An adapter on a device. `text`: the adapter's matrices for the decoder. `vision`: the adapted vision
    tower; None if the adapter does not change the tower.
    """

    text: PackedAdapter | list[tuple[LoraPart, ...]]
    vision: object | None


class AdapterRows(NamedTuple):
    """An adapter, and the tokens in a step that are computed with this adapter."""

    adapter: LoadedAdapter
    rows: np.ndarray  # int32 [n], the tokens' indices in the batch.
