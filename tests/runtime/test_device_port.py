"""Tests of the device interface: only one file uses CUDA, and a third-party device works like built-in
ones.
"""

import inspect
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from PIL import Image

from mmengine import registry
from mmengine.config import EngineConfig
from mmengine.errors import ConfigError
from mmengine.runtime.device.cpu import CpuDevice, DoneEvent
from mmengine.runtime.device.registry import DEVICES, open_device
from mmengine.serve.engine.engine import Engine
from mmengine.serve.prompt.prompt import Prompt

ROOT = Path(__file__).resolve().parents[2]
NAMES_CUDA = re.compile(r"torch\.cuda|torch\.version\.cuda|\.is_cuda\b|\.cuda\(|[\"']cuda(:\d+)?[\"']")
# Lines outside the device's file that may name CUDA: the kernels' device types, the registry's entry, install
# hints, and the pipeline's device names.
ELSEWHERE = {
    "mmengine/gpu/__init__.py": 'DEVICE_TYPES = ("cuda",)',
    "mmengine/runtime/attention/flashinfer_capability.py": 'install_hint("cuda")',
    "mmengine/runtime/attention/flashinfer_host_plan.py": "install_hint('cuda')",
    "mmengine/runtime/device/registry.py": '"cuda": "mmengine.runtime.device.cuda:CudaDevice"',
    "mmengine/serve/pipeline/construction.py": 'in ("auto", "cpu", "cuda")',
    "mmengine/serve/pipeline/pipeline.py": '`device` is a name such as "cpu" or "cuda"',
}
OWN = "mmengine/runtime/device/cuda.py"


def test_one_file_names_cuda():
    found = {}
    for file in sorted([*ROOT.glob("mmengine/**/*.py"), *ROOT.glob("plugins/**/*.py")]):
        name = str(file.relative_to(ROOT))
        lines = [line for line in file.read_text().splitlines() if NAMES_CUDA.search(line)]
        if lines:
            found[name] = lines
    assert len(found.pop(OWN)) > 30
    assert found.keys() == ELSEWHERE.keys()
    for name, told in ELSEWHERE.items():
        assert len(found[name]) == 1 and told in found[name][0], name


class Counted(DoneEvent):
    """An event that counts how often it was awaited."""

    awaited = 0

    def synchronize(self):
        Counted.awaited += 1


class Ours(CpuDevice):
    """A CPU device that claims to be asynchronous and to have its own memory, like a GPU."""

    kind = "ours"
    is_async = has_own_memory = True
    attention = ("native",)

    def event(self, *, timed=False):
        return Counted()

    def memory(self):
        return 2**30, 2**31

    def meter(self):
        return SimpleNamespace(reset=lambda: None, peak=lambda: 2**20)


@pytest.fixture
def no_cuda(monkeypatch):
    """Make every use of torch.cuda an error."""

    def refuse(name):
        def refused(*arguments, **options):
            raise AssertionError(f"torch.cuda.{name} was asked for")

        return refused

    entered = {"CUDAGraph", "Event", "Stream", "StreamContext", "device", "graph"}
    for name, value in vars(torch.cuda).items():
        if name in entered or (inspect.isfunction(value) and not name.startswith("_")):
            monkeypatch.setattr(torch.cuda, name, refuse(name))


@pytest.fixture
def installed(monkeypatch):
    """Install the device as an entry point, as a third-party package would."""
    point = SimpleNamespace(name="ours", value="theirs:Ours", load=lambda: Ours, dist=None, extras=())
    others = registry.entry_points

    def found(group):
        return [point] if group == DEVICES.group else others(group=group)

    monkeypatch.setattr(registry, "entry_points", found)
    return point


def answers(device):
    picture = Image.radial_gradient("L").resize((64, 64)).convert("RGB")
    messages = [
        {"role": "user", "content": [{"type": "image", "image": picture}, {"type": "text", "text": "?"}]}
    ]
    # Small budgets, because the largest step is run to measure memory.
    config = EngineConfig(max_model_len=256, max_num_seqs=4, token_budget=128, encoder_budget=128)
    with Engine(config=config, device=device) as engine:
        prompts = [Prompt.of("Who are you?"), Prompt(messages=messages)]
        found = engine.generate(prompts, max_tokens=24, ignore_eos=True)
        return engine, [answer.choices[0].token_ids for answer in found]


def test_a_third_party_device_answers_like_the_cpu(no_cuda, installed, monkeypatch):
    _, wanted = answers("cpu")
    monkeypatch.setattr(Counted, "awaited", 0)
    engine, found = answers("ours")
    assert found == wanted
    built = engine.built
    assert built.device == "ours" and built.config.max_in_flight == 2 and built.dtype == "float32"
    assert Counted.awaited > 20, "steps must be launched ahead and awaited"
    with pytest.raises(AssertionError, match="torch.cuda.is_available was asked for"):
        open_device("auto")


@pytest.mark.parametrize(
    "name, told",
    [
        ("ours:x", "'ours:x' is not a device; use auto, cpu, cuda, cuda:N, ours or ours:N"),
        ("xpu", "device 'xpu' is not supported; use auto, cpu, cuda, cuda:N, ours or ours:N"),
        ("ours:2", "device ours:2 cannot be used: there is one"),
    ],
)
def test_an_unavailable_device_is_refused(installed, monkeypatch, name, told):
    monkeypatch.setattr(Ours, "problem", lambda index: "there is one" if index else None)
    with pytest.raises(ConfigError, match=f"^{told}$"):
        open_device(name)


def test_an_unloadable_device_is_reported(installed):
    def broken():
        raise ImportError("no driver")

    installed.load = broken
    with pytest.raises(
        ConfigError, match=r"^device ours cannot be loaded \(ImportError: no driver\); update"
    ):
        open_device("ours")
    with pytest.warns(UserWarning, match="device ours cannot be loaded"):
        assert open_device("auto").kind == ("cuda" if torch.cuda.is_available() else "cpu")


def test_auto_chooses_an_available_device(installed, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert open_device("auto").kind == "ours"
    monkeypatch.setattr(Ours, "is_available", lambda: False)
    assert open_device("auto").kind == "cpu"
