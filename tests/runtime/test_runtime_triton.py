"""Tests in which cases the Triton attention kernels are refused. The kernels' results are tested in
tests/gpu.
"""

from types import SimpleNamespace

import pytest
import torch

from mmengine.errors import ConfigError
from mmengine.runtime.attention import registry, triton_capability, triton_paged
from mmengine.runtime.attention.torch_paged import TorchPagedAttention
from mmengine.runtime.device.cpu import CpuDevice
from mmengine.runtime.device.cuda import CudaDevice
from mmengine.runtime.kv.pool import KVPool
from tests.native.attention_cases import spec_of


def pool_of(spec, dtype=torch.float32):
    return KVPool(spec, 4, 16, dtype, CpuDevice())


@pytest.mark.parametrize(
    "head_dim, dtype, installed, interpreted, says",
    [
        (32, torch.float64, True, True, "float32, bfloat16 and float16, not float64"),
        (33, torch.float32, True, True, "not of 33"),
        (258, torch.float32, True, True, "not of 258"),
        (32, torch.float32, False, True, "triton is not installed; it comes with torch for CUDA"),
        (32, torch.float32, True, False, "it computes on a GPU, but the KV pool is on cpu"),
        (32, torch.bfloat16, True, True, "interpreter multiplies bfloat16 wrongly"),
        (32, torch.float16, True, True, None),
    ],
)
def test_unsupported_shapes_are_reported(monkeypatch, head_dim, dtype, installed, interpreted, says):
    monkeypatch.setattr(triton_capability, "find_spec", lambda name: object() if installed else None)
    monkeypatch.setattr(triton_capability, "_is_interpreted", lambda: interpreted)
    spec = spec_of(4, 2, head_dim)
    kv = pool_of(spec, dtype)
    found = triton_capability.unfit(spec, kv)
    if says is None:
        assert found is None
        return
    assert says in found
    with pytest.raises(ConfigError, match="attention 'triton' cannot be used: .*; choose 'torch' or 'auto'"):
        registry.make_backend("triton", spec, kv)


def test_an_old_gpu_is_reported(monkeypatch):
    monkeypatch.setattr(triton_capability, "find_spec", lambda name: object())
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    assert "compute capability 7.5, and 8.0 is needed" in triton_capability.missing(CudaDevice())


def pretend(monkeypatch, attend):
    """Make the backend believe that the kernels can be used, and replace them with `attend`."""
    monkeypatch.setattr(triton_paged, "unfit", lambda spec, kv: None)
    monkeypatch.setattr(triton_paged, "load", lambda: SimpleNamespace(attend=attend))


def test_kernels_that_do_not_run_are_reported_at_once(monkeypatch):
    def attend(q, blocks, work):
        raise RuntimeError("ptxas died\nwith pages of reasons")

    pretend(monkeypatch, attend)
    spec = spec_of(4, 2, 32)
    with pytest.raises(
        ConfigError, match=r"compiled or run on this machine \(RuntimeError: ptxas died\); choose"
    ):
        registry.make_backend("triton", spec, pool_of(spec))


@pytest.mark.parametrize("wrong", [0.0, float("nan")])
def test_kernels_with_wrong_results_are_reported_at_once(monkeypatch, wrong):
    pretend(monkeypatch, lambda q, blocks, work: torch.full_like(q, wrong))
    spec = spec_of(4, 2, 32)
    with pytest.raises(ConfigError, match=r"differ from torch by \S+ on this machine, more than 1.0e-04"):
        registry.make_backend("triton", spec, pool_of(spec))


def test_an_unimportable_triton_is_reported(monkeypatch):
    def breaks(name):
        raise ImportError("libcuda.so.1: cannot open shared object file")

    monkeypatch.setattr(triton_capability, "import_module", breaks)
    with pytest.raises(ConfigError, match="importing it fails .*libcuda.so.1.*choose 'torch' or 'auto'"):
        triton_capability.load()


def test_the_kernels_are_compared_with_torch(monkeypatch):
    """Before use, the backend compares the kernels with torch for all tile sizes, also for unusual numbers of
    heads.
    """
    made = []

    class Watched(TorchPagedAttention):
        def begin(self, meta, bucket=None):
            made.append(meta)
            super().begin(meta)

        def run(self, layer, q):
            self.found = super().run(layer, q)
            return self.found

    monkeypatch.setattr(triton_paged, "TorchPagedAttention", Watched)
    pretend(monkeypatch, lambda q, blocks, work: torch.zeros_like(q))
    for heads, kv_heads in ((4, 2), (71, 1), (3, 3)):
        spec = spec_of(heads, kv_heads, 6)
        with pytest.raises(ConfigError, match="differ from torch"):
            registry.make_backend("triton", spec, pool_of(spec))
    assert len(made) == 9 and {int(meta.query_lens[0]) for meta in made} >= {1, 8, 16, 32, 64}
