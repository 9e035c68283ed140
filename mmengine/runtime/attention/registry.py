"""Selects attention backends by name, including third-party backends.

A third-party backend is an entry point in the group `mmengine.attention_backends`. The entry point names a
callable that makes an AttentionBackend from a ModelSpec and a KVPool.
"""

from collections.abc import Callable, Sequence

import structlog

from mmengine.block_groups import BlockGroup
from mmengine.errors import ConfigError
from mmengine.models.layer_groups import groups_unfit
from mmengine.models.plugin import ModelSpec
from mmengine.registry import Registry
from mmengine.runtime.attention import flashinfer_capability, native_paged, triton_capability
from mmengine.runtime.attention.base import AttentionBackend
from mmengine.runtime.attention.grouped import GroupedAttention
from mmengine.runtime.attention.layered import LayeredAttention, check_spec, log_features, masked_features
from mmengine.runtime.attention.native_paged import NativePagedAttention
from mmengine.runtime.kv.pool import KVPool

ATTENTION_BACKENDS: Registry[Callable[..., AttentionBackend]] = Registry(
    "mmengine.attention_backends",
    "attention backend",
    own={
        "flashinfer": "mmengine.runtime.attention.flashinfer_paged:FlashInferAttention [cuda]",
        "native": "mmengine.runtime.attention.native_paged:NativePagedAttention",
        "torch": "mmengine.runtime.attention.torch_paged:TorchPagedAttention",
        "triton": "mmengine.runtime.attention.triton_paged:TritonPagedAttention",
    },
    beside=("auto",),
)
# The function `unfit` in these modules returns why a built-in backend does not support a KV pool, or None. A
# third-party backend raises ConfigError instead.
_CAPABILITIES = {"flashinfer": flashinfer_capability, "native": native_paged, "triton": triton_capability}
log = structlog.get_logger("mmengine.operators")


def make_backend(
    name: str,
    spec: ModelSpec,
    kv: KVPool,
    *,
    batch_invariant: bool = False,
    groups: Sequence[BlockGroup] = (),
) -> AttentionBackend:
    """Return the backend `name`. Layers that need more than plain causal attention use the CPU kernels if
    possible, otherwise torch. Each group in `groups` (KV block groups) has its own backend.

    "auto" selects the device's most preferred backend that supports the pool and the model's shape. If none
    does, "auto" selects torch. With `batch_invariant`, a row's result has the same bits in any batch, and
    with any split of its tokens into steps.

    Raises ConfigError if the name is not registered, or if the backend cannot be used on this machine or is
    not batch invariant.
    """
    if groups and (problem := groups_unfit(spec, groups)):
        raise ConfigError(f"block_groups do not describe this model: {problem}")
    if len(groups) > 1:
        return GroupedAttention(
            spec, groups, lambda own: make_backend(name, own, kv, batch_invariant=batch_invariant)
        )
    if not spec.attention:
        return _plain_backend(name, spec, kv, batch_invariant)
    check_spec(spec, name)
    features = masked_features(spec)
    if features and batch_invariant:
        raise ConfigError(
            "batch_invariant needs a batch-invariant attention backend, and none computes "
            f"{', '.join(features)}, which this model has; set no batch_invariant"
        )
    is_native = name == "native" or (name == "auto" and native_paged.unfit(spec, kv) is None)
    is_plain = any(layer.is_plain(spec.head_dim) for layer in spec.attention)
    fast = _plain_backend(name, spec, kv, batch_invariant) if is_native or is_plain else None
    if not isinstance(fast, NativePagedAttention):
        if fast is not None and not features and not spec.shares_kv:
            return fast
        log_features(spec)
    return LayeredAttention(spec, kv, fast)


def _plain_backend(name: str, spec: ModelSpec, kv: KVPool, batch_invariant: bool) -> AttentionBackend:
    if batch_invariant:
        return _invariant(name, spec, kv)
    if name == "auto":
        return _automatic(spec, kv)
    return ATTENTION_BACKENDS.load(name)(spec, kv)


def _invariant(name: str, spec: ModelSpec, kv: KVPool) -> AttentionBackend:
    usual = kv.device.invariant_attention
    chosen = usual if name == "auto" else name
    problem: str | None = f"that is {usual} on {kv.device.name}, not {name}"
    if chosen == "triton":
        problem = triton_capability.unfit(spec, kv)
        if problem is None:
            return ATTENTION_BACKENDS.load("triton")(spec, kv, one_tile=True)
    elif chosen == "native":
        problem = native_paged.unfit(spec, kv)
        if problem is None:
            return ATTENTION_BACKENDS.load("native")(spec, kv, tiles_only=True)
    raise ConfigError(
        f"batch_invariant needs a batch-invariant attention backend: {problem}; "
        "change one of the two settings"
    )


def _automatic(spec: ModelSpec, kv: KVPool) -> AttentionBackend:
    reasons: dict[str, str] = {}  # backend -> why it cannot be used
    for name in kv.device.attention:
        capability = _CAPABILITIES.get(name)
        reason = None if capability is None else capability.unfit(spec, kv)
        if reason is None:
            try:
                made = ATTENTION_BACKENDS.load(name)(spec, kv)
            except ConfigError as error:
                reason = str(error)
            else:
                if reasons:
                    log.info(f"attention by {name}", **reasons)
                return made
        reasons[name] = reason
    if kv.device.torch_device.type != "cpu":
        log.warning("attention by torch, which is slower on a GPU", **reasons)
    return ATTENTION_BACKENDS.load("torch")(spec, kv)
