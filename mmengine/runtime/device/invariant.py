"""Checks whether a model on a device can return results that do not depend on the batch (batch
invariance).
"""

from mmengine.errors import ConfigError
from mmengine.gpu.sampling import describe, sampling_kernels
from mmengine.models.plugin import VisionLanguageModel
from mmengine.runtime.device.port import Device

NOT_INVARIANT = (
    "batch_invariant needs a decoder whose results do not depend on the row count, as torch's matmuls "
    "do: use a GPU with Triton, or the CPU kernels (see mmengine env), or turn batch_invariant off"
)


def check_invariant(model: VisionLanguageModel, device: Device) -> None:
    """Raise ConfigError if the decoder's or the sampler's results depend on the batch.

    make_backend (runtime/attention/registry.py) checks the attention backend.
    """
    if not getattr(model, "batch_invariant", False):
        raise ConfigError(NOT_INVARIANT)
    where = device.torch_device
    if where.type != "cpu" and sampling_kernels(where) is None:
        raise ConfigError(
            f"batch_invariant needs the Triton sampling kernels, but {device.name} samples by "
            f"{describe(where)}; turn batch_invariant off"
        )
