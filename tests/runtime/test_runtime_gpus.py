"""Tests the errors for GPUs that cannot be used, with torch's messages from other machines."""

import pytest
import torch

from mmengine.build import build
from mmengine.errors import ConfigError
from mmengine.runtime.device.cuda import CudaDevice
from mmengine.runtime.device.registry import open_device


def machine(monkeypatch, cuda, count, error=None):
    def init():
        if error is not None:
            raise error

    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.setattr(torch.cuda, "init", init)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)


OLD = RuntimeError(
    "The NVIDIA driver on your system is too old (found version 11040). Please update your GPU driver.\nmore"
)


@pytest.mark.parametrize(
    "cuda, count, error, device, told",
    [
        (None, 0, None, "cuda", "this build of torch supports only CPUs; install a CUDA build"),
        ("13.0", 0, OLD, "cuda", r"too old \(found version 11040\).*driver; `nvidia-smi` shows the driver"),
        ("13.0", 0, None, "cuda", "torch sees no GPU; check `nvidia-smi`"),
        ("13.0", 1, None, "cuda:1", "torch sees one GPU, cuda:0$"),
        ("13.0", 4, None, "cuda:7", "torch sees GPUs cuda:0 to cuda:3$"),
    ],
)
def test_one_sentence_says_why_and_what_to_do(monkeypatch, cuda, count, error, device, told):
    machine(monkeypatch, cuda, count, error)
    with pytest.raises(ConfigError, match=f"^device {device} cannot be used: .*{told}") as raised:
        build(device=device)
    assert "\n" not in str(raised.value)


def test_an_available_gpu_has_no_problem(monkeypatch):
    machine(monkeypatch, "13.0", 2)
    assert CudaDevice.problem(1) is None and CudaDevice.problem(None) is None


@pytest.mark.parametrize("device, number", [("cuda:1", 1), ("cuda", None), ("cpu", None)])
def test_the_requested_gpu_is_current(monkeypatch, device, number):
    """`current` makes a GPU current only if its number was given. The machine has two fake GPUs."""
    machine(monkeypatch, "13.0", 2)
    monkeypatch.setattr(torch.cuda, "device", lambda number: f"GPU {number}")
    found = open_device(device).current()
    assert found == f"GPU {number}" if number is not None else not isinstance(found, str)
