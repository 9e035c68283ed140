"""Attention backends by name."""

from mmengine.errors import ConfigError
from mmengine.models.plugin import ModelSpec
from mmengine.native.library import load
from mmengine.runtime.attention.base import AttentionBackend
from mmengine.runtime.attention.native_paged import NativePagedAttention, unfit
from mmengine.runtime.attention.torch_paged import TorchPagedAttention
from mmengine.runtime.kv import KVPool

BACKENDS: dict[str, type[AttentionBackend]] = {
    "native": NativePagedAttention,
    "torch": TorchPagedAttention,
}


def make_backend(name: str, spec: ModelSpec, kv: KVPool) -> AttentionBackend:
    """The backend called `name`; "auto" takes our kernels where they can be had for the pool and the
    model's shape, else torch.

    Raises ConfigError for a name that is not registered, or a backend that cannot be used here.
    """
    if name == "auto":
        name = "torch" if unfit(spec, kv) or load() is None else "native"
    if name not in BACKENDS:
        known = ", ".join(["auto", *BACKENDS])
        raise ConfigError(f"there is no attention backend {name!r}; choose one of {known}")
    return BACKENDS[name](spec, kv)
