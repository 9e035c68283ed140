"""Attention backends by name."""

import structlog

from mmengine.errors import ConfigError
from mmengine.models.plugin import ModelSpec
from mmengine.native.library import load
from mmengine.runtime.attention import flashinfer_capability, native_paged, triton_capability
from mmengine.runtime.attention.base import AttentionBackend
from mmengine.runtime.attention.flashinfer_paged import FlashInferAttention
from mmengine.runtime.attention.native_paged import NativePagedAttention
from mmengine.runtime.attention.torch_paged import TorchPagedAttention
from mmengine.runtime.attention.triton_paged import TritonPagedAttention
from mmengine.runtime.kv.pool import KVPool

BACKENDS: dict[str, type[AttentionBackend]] = {
    "flashinfer": FlashInferAttention,
    "native": NativePagedAttention,
    "torch": TorchPagedAttention,
    "triton": TritonPagedAttention,
}
log = structlog.get_logger("mmengine.operators")


def make_backend(
    name: str, spec: ModelSpec, kv: KVPool, *, batch_invariant: bool = False
) -> AttentionBackend:
    """The backend called `name`; "auto" takes FlashInfer on a GPU, or else Triton, and our kernels on a CPU,
    where they can be had for the pool and the model's shape, else torch. `batch_invariant`: one whose result
    for a row has the same bits whatever else is in the step, and however the row's tokens are spread over
    steps.

    Raises ConfigError for a name that is not registered, or a backend that cannot be used here.
    """
    if batch_invariant:
        return _invariant(name, spec, kv)
    if name == "auto":
        return _automatic(spec, kv)
    if name not in BACKENDS:
        known = ", ".join(["auto", *BACKENDS])
        raise ConfigError(f"there is no attention backend {name!r}; choose one of {known}")
    return BACKENDS[name](spec, kv)


def _invariant(name: str, spec: ModelSpec, kv: KVPool) -> AttentionBackend:
    device = kv.blocks.device
    usual = "native" if device.type == "cpu" else "triton"
    chosen = usual if name == "auto" else name
    problem: str | None = f"that is {usual} on {device}, not {name}"
    if chosen == "triton":
        problem = triton_capability.unfit(spec, kv)
        if problem is None:
            return TritonPagedAttention(spec, kv, one_tile=True)
    elif chosen == "native":
        problem = native_paged.unfit(spec, kv)
        if problem is None:
            return NativePagedAttention(spec, kv, tiles_only=True)
    raise ConfigError(f"batch_invariant needs attention that is too: {problem}; leave one of them out")


def _automatic(spec: ModelSpec, kv: KVPool) -> AttentionBackend:
    if kv.blocks.device.type == "cpu":
        is_native = not native_paged.unfit(spec, kv) and load() is not None
        return (NativePagedAttention if is_native else TorchPagedAttention)(spec, kv)
    reasons: dict[str, str] = {}  # why not, by backend
    for name, backend, unfit in (
        ("flashinfer", FlashInferAttention, flashinfer_capability.unfit),
        ("triton", TritonPagedAttention, triton_capability.unfit),
    ):
        reason = unfit(spec, kv)
        if reason is None:
            try:
                made = backend(spec, kv)
            except ConfigError as error:
                reason = str(error)
            else:
                if reasons:
                    log.info(f"attention by {name}", **reasons)
                return made
        reasons[name] = reason
    log.warning("attention by torch, which is slower on a GPU", **reasons)
    return TorchPagedAttention(spec, kv)
