"""The plugin object, which serves architectures that no other plugin claims.

Importing this module imports neither torch nor transformers.
"""

from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import numpy as np

from mmengine.checkpoint.fingerprint import fingerprint
from mmengine.checkpoint.model_files import read_model_json
from mmengine.errors import ConfigError, ModelError
from mmengine.extras import install_hint
from mmengine.models.box_unit import BoxUnit
from mmengine.models.decoder.positions import text_positions
from mmengine.models.plugin import Processor
from mmengine.models.sharding import Shard
from mmengine.models.spec import ModelSpec
from mmengine.request import MediaItem
from mmengine_transformers.names import NAMES
from mmengine_transformers.torchvision import import_reason

if TYPE_CHECKING:  # `network` imports torch and transformers, which are slow to load.
    from mmengine_transformers.network import HostedNetwork


class TransformersPlugin:
    """A ModelPlugin for every architecture whose modules call a replaceable attention function."""

    # Empty, because this plugin serves only architectures that no other plugin claims.
    architectures: tuple[str, ...] = ()
    box_units = {"qwen2_5_vl": BoxUnit("pixels", 14)}

    def check(self, folder: Path) -> None:
        """Raise ModelError, with the reason, if the model in `folder` cannot be served. Reads no weights."""
        if find_spec("transformers") is None:
            architectures = read_model_json(folder, "config.json").get("architectures")
            names = ", ".join(map(str, architectures if isinstance(architectures, list) else ()))
            raise ModelError(
                f"{folder} is a {names[:100]}, which mmengine does not describe; to run transformers' "
                f"modules, install the extra transformers ({install_hint('transformers')})"
            )
        try:
            from mmengine_transformers.classes import read_model
        except ImportError as error:
            raise ModelError(f"{folder}: {import_reason('transformers', error)}") from error
        read_model(folder)

    def describe(self, folder: Path) -> ModelSpec:
        """See ModelPlugin. Raises ModelError for a model that cannot be served."""
        from mmengine_transformers.sizes import describe

        return describe(folder)

    def load_processor(self, folder: Path) -> Processor:
        from mmengine_transformers.processing import load_processor

        return load_processor(folder)

    def load_model(
        self,
        folder: Path,
        *,
        device: str,
        dtype: str,
        shard: Shard | None = None,
        batch_invariant: bool = False,
        quantize: Literal["none", "int8", "fp8"] = "none",
        activations: Literal["model", "int8"] = "model",
    ) -> "HostedNetwork":
        """See ModelPlugin. Raises ModelError for a model that cannot be served, and ConfigError for
        an unsupported setting.
        """
        from mmengine_transformers.network import load_network

        if shard is not None or batch_invariant:
            asked = "batch_invariant" if shard is None else "tensor_parallel"
            raise ConfigError(
                f"{asked} needs a model that mmengine describes; this one runs transformers' modules, so "
                f"leave {asked} out"
            )
        return load_network(folder, device=device, dtype=dtype, quantize=quantize, activations=activations)

    def fingerprint(self, folder: Path) -> str:
        return fingerprint(folder, NAMES)

    def positions(self, prompt_token_ids: np.ndarray, media: Sequence[MediaItem]) -> tuple[np.ndarray, int]:
        """See ModelPlugin."""
        return text_positions(len(prompt_token_ids))
