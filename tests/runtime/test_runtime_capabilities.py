"""Tests the capabilities that `mmengine env` shows, on simulated machines."""

from importlib import metadata

import pytest
import torch

from mmengine.runtime.attention import flashinfer_capability, triton_capability
from mmengine.runtime.startup import capabilities

GIB = 2**30


def machine(
    monkeypatch, *, gpus=0, cuda="13.0", capability=(9, 0), flashinfer="0.7.2.post1", triton=True, nccl=True
):
    def version(name):
        if flashinfer is None:
            raise metadata.PackageNotFoundError(name)
        return flashinfer

    monkeypatch.setattr(flashinfer_capability.metadata, "version", version)
    monkeypatch.setattr(triton_capability, "find_spec", lambda name: object() if triton else None)
    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.setattr(torch.cuda, "init", lambda: None)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: "NVIDIA H200")
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda index: (100 * GIB, 141 * GIB))
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: nccl)


def test_a_gpu_with_flashinfer(monkeypatch):
    machine(monkeypatch, gpus=2)
    assert capabilities.gpus() == ["NVIDIA H200, compute capability 9.0, 100.0 of 141.0 GiB free"] * 2
    assert capabilities.attention()["flashinfer"] == "usable"
    assert capabilities.automatic_attention().startswith("flashinfer on a GPU, ")
    assert capabilities.tensor_parallel() == "up to 2 GPUs, by NCCL"


@pytest.mark.parametrize(
    ("facts", "says"),
    [
        ({"gpus": 1, "flashinfer": None}, "flashinfer-python is not installed; pip install '.[cuda]'"),
        ({"gpus": 1, "flashinfer": "0.8.1"}, "0.8.1 is installed, and 0.7.2 up to, not including, 0.8"),
        ({"gpus": 1, "capability": (7, 5)}, "this GPU has compute capability 7.5, and 8.0 is needed"),
        ({"gpus": 0}, "torch sees no GPU; check `nvidia-smi`"),
        ({"cuda": None}, "this build of torch supports only CPUs"),
    ],
)
def test_missing_parts_of_flashinfer(monkeypatch, facts, says):
    machine(monkeypatch, **facts)
    text = capabilities.attention()["flashinfer"]
    assert text.startswith("not usable: ") and says in text and "\n" not in text
    assert "flashinfer" not in capabilities.automatic_attention()


@pytest.mark.parametrize(
    ("facts", "says", "chosen"),
    [
        ({"gpus": 1, "flashinfer": None}, "usable", "triton on a GPU, "),
        ({"gpus": 1, "capability": (7, 5)}, "this GPU has compute capability 7.5", "torch on a GPU, "),
        ({"gpus": 1, "triton": False}, "triton is not installed; it comes with", "flashinfer on a GPU, "),
        ({"gpus": 1, "flashinfer": None, "triton": False}, "triton is not installed", "torch on a GPU, "),
        ({"gpus": 0}, "torch sees no GPU", ""),
    ],
)
def test_where_triton_attends(monkeypatch, facts, says, chosen):
    machine(monkeypatch, **facts)
    text = capabilities.attention()["triton"]
    assert text.removeprefix("not usable: ").startswith(says) and "\n" not in text
    assert capabilities.automatic_attention().startswith(chosen)
    assert "triton" not in capabilities.automatic_attention() or chosen.startswith("triton")


@pytest.mark.parametrize(
    ("facts", "says"),
    [({"gpus": 0}, "by gloo; there is no GPU"), ({"gpus": 4, "nccl": False}, "built without NCCL")],
)
def test_missing_parts_of_tensor_parallelism(monkeypatch, facts, says):
    machine(monkeypatch, **facts)
    assert says in capabilities.tensor_parallel()


def test_no_kernels(hidden_compiler, tmp_path):
    with hidden_compiler(tmp_path):
        assert capabilities.attention()["native"].startswith("not usable: ")
        assert capabilities.automatic_attention() in ("torch", "flashinfer on a GPU, torch on a CPU")
