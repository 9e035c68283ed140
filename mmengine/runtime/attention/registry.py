"""Attention backends by name."""

from mmengine.errors import ConfigError
from mmengine.models.plugin import ModelSpec
from mmengine.runtime.attention.base import AttentionBackend
from mmengine.runtime.attention.torch_paged import TorchPagedAttention
from mmengine.runtime.kv import KVPool

BACKENDS: dict[str, type[AttentionBackend]] = {
    "torch": TorchPagedAttention,
}


def make_backend(name: str, spec: ModelSpec, kv: KVPool) -> AttentionBackend:
    """The backend called `name`; "auto" takes the best one for the pool's device.

    Raises ConfigError for a name that is not registered.
    """
    if name == "auto":
        name = "torch"
    if name not in BACKENDS:
        known = ", ".join(["auto", *BACKENDS])
        raise ConfigError(f"there is no attention backend {name!r}; choose one of {known}")
    return BACKENDS[name](spec, kv)
