"""A base class for model plugins whose networks are completely described by a NetworkConfig."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from mmengine.checkpoint.fingerprint import fingerprint
from mmengine.checkpoint.names import TensorNames
from mmengine.checkpoint.peft import AdapterFiles, read_adapter
from mmengine.models.adapter_modules import adapter_modules
from mmengine.models.config import NetworkConfig, make_spec
from mmengine.models.plugin import Processor
from mmengine.models.sharding import Shard
from mmengine.models.spec import ModelSpec
from mmengine.request import MediaItem

if TYPE_CHECKING:  # These modules import torch, which is slow to load.
    from mmengine.models.network import Network
    from mmengine.models.quantising import Activations, Quantize


class DescribedPlugin(ABC):
    """A base class for ModelPlugins. Subclasses add the methods that differ between model families. `names`:
    maps the tensor names in files to canonical names.

    Importing this module imports neither torch nor a processor. The methods import them when they are called.
    """

    architectures: tuple[str, ...]
    names: TensorNames

    @abstractmethod
    def read_config(self, folder: Path) -> NetworkConfig:
        """Return the sizes and options for the networks. Raises ModelError that names the file and the
        field.
        """

    @abstractmethod
    def load_processor(self, folder: Path) -> Processor: ...

    @abstractmethod
    def positions(self, prompt_token_ids: np.ndarray, media: Sequence[MediaItem]) -> tuple[np.ndarray, int]:
        """See ModelPlugin."""

    def describe(self, folder: Path) -> ModelSpec:
        """See ModelPlugin. Raises ModelError that names the file and the field."""
        return make_spec(self.read_config(folder))

    def load_model(
        self,
        folder: Path,
        *,
        device: str,
        dtype: str,
        shard: Shard | None = None,
        batch_invariant: bool = False,
        quantize: "Quantize" = "none",
        activations: "Activations" = "model",
    ) -> "Network":
        """See `load_network`."""
        from mmengine.models.network import load_network  # Imported here, because it imports torch.

        return load_network(
            folder,
            self.read_config(folder),
            self.names,
            device=device,
            dtype=dtype,
            shard=shard,
            batch_invariant=batch_invariant,
            quantize=quantize,
            activations=activations,
        )

    def read_adapter(self, folder: Path, adapter: Path, max_bytes: int, value_bytes: int) -> AdapterFiles:
        """See ModelPlugin."""
        modules = adapter_modules(self.read_config(folder))
        return read_adapter(adapter, self.names.canonical, modules, max_bytes, value_bytes)

    def fingerprint(self, folder: Path) -> str:
        return fingerprint(folder, self.names)
