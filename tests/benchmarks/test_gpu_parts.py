"""Tests the parts of the GPU check as far as possible on a CPU."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch


class Told:
    """A reporter that stores the results of a part."""

    def __init__(self, dry=True):
        self.dry, self.device = dry, "cpu"
        self.checks, self.facts, self.skipped, self.goals = [], {}, {}, {}

    def check(self, verdict):
        self.checks.append(verdict)

    def fact(self, name, value):
        self.facts[name] = value

    def skip(self, name, why):
        self.skipped[name] = why

    def goal(self, name, goal):
        self.goals[name] = goal


class Event:
    """A stand-in for a CUDA event. The clock advances by a millisecond per recorded event."""

    now = 0

    def __init__(self, enable_timing):
        assert enable_timing
        self.at = None

    def record(self):
        Event.now += 1
        self.at = Event.now

    def synchronize(self):
        assert self.at is not None

    def elapsed_time(self, other):
        return float(other.at - self.at)


def test_a_gpu_is_timed_by_its_own_clock_when_it_is_warm(module, monkeypatch):
    floors, runs = module("gpu.roofline"), []
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(floors, "WARM_S", 0.001)
    assert floors.timed(lambda: runs.append(1), "cuda", 5) == 0.001
    assert len(runs) > 5


def test_answers_of_a_wide_model_are_right_and_wrong_ones_are_found(module):
    """The engine's answers pass. Answers to other prompts and answers that are cut short are found."""
    wide = module("gpu.wide")
    verdict, how = wide.compare_wide("cpu", torch.float32, 8, 3)
    assert verdict.right and "Attention" in how
    shape = module("gpu.shapes").wide_shape(4)
    answers, _ = wide.greedy_answers(shape, "cpu", torch.bfloat16, 3)
    assert max(wide.gaps(shape, answers, "cpu", torch.bfloat16)) <= wide.ROUNDING[torch.bfloat16]
    others = [((prompt + 5) % 512, *answer) for prompt, *answer in answers]
    assert max(wide.gaps(shape, others, "cpu", torch.bfloat16)) > wide.ROUNDING[torch.bfloat16]
    cut = [(prompt, tokens[:-1], logprobs[:-1]) for prompt, tokens, logprobs in answers]
    assert wide.gaps(shape, cut, "cpu", torch.bfloat16) == [float("inf")] * 3


def test_continuous_batching_answers_what_generate_does(module):
    """For text prompts, transformers' continuous batching gives the same tokens as `generate`."""
    rival, shapes = module("gpu.transformers_rates"), module("gpu.shapes")
    shape = shapes.reduced(shapes.SHAPES["2B"])
    asks = module("common.workload").random_texts(3, 20, 6, shape.text.vocab_size)
    model = rival.transformers_model(shape, "cpu", torch.float32)
    with torch.no_grad():  # With the model's own random weights, each next token would equal the last token.
        for weights in model.model.parameters():
            weights.copy_(torch.randn_like(weights) * (0.2 if weights.ndim > 1 else 1))
    inputs = [module("common.reference").make_inputs([ask.prepared]) for ask in asks]
    wanted = [model.generate(each, 6)[0] for each in inputs]
    assert len({token for answer in wanted for token in answer}) > 3
    _, found = rival.answer_continuously(model, asks, {}, runs=1)
    assert found == wanted
    assert rival.attention_of(model, asks).removeprefix("paged|") == "sdpa"


def test_a_way_that_cannot_run_says_why(module, monkeypatch):
    """If continuous batching fails, the error's first line replaces the rate."""
    rival = module("gpu.transformers_rates")

    def fails(*_):
        raise RuntimeError("CUDA out of memory\nand more")

    monkeypatch.setattr(rival, "answer_continuously", fails)
    monkeypatch.setattr(torch.backends.cuda, "enable_cudnn_sdp", lambda on: None)
    model = SimpleNamespace(model=SimpleNamespace(device=torch.device("cuda")))
    asks = [SimpleNamespace(num_new=4)]
    rates = dict(rival.continuous_rates(model, asks))
    assert len(rates) == 3 and set(rates.values()) == {"RuntimeError: CUDA out of memory"}


def test_generate_is_timed_over_all_tokens_of_all_batches(module, monkeypatch):
    rival, shapes = module("gpu.transformers_rates"), module("gpu.shapes")
    shape = shapes.reduced(shapes.SHAPES["2B"])
    asks = rival.image_asks(shape, 5, (1, 4, 4), 8, 3)
    sizes = []

    def generate(inputs, num_new):
        sizes.append((len(inputs["input_ids"]), num_new))
        return [[0] * num_new] * len(inputs["input_ids"])

    times = iter((10.0, 12.0))
    monkeypatch.setattr(rival.time, "perf_counter", lambda: next(times))
    model = SimpleNamespace(parameters=lambda: iter([torch.zeros(1, dtype=torch.bfloat16)]))
    rate = rival.generate_rate(SimpleNamespace(model=model, generate=generate), asks, 2)
    assert rate == 15 / 2.0 and sizes == [(2, 2), (2, 3), (2, 3), (1, 3)]


def test_nothing_is_compiled_where_flashinfer_is_not(module, monkeypatch):
    parts = module("gpu.parts")
    monkeypatch.setattr(parts.flashinfer_capability, "installed", lambda: None)
    assert parts.compiling(False) == {} == parts.compiling(True)
    monkeypatch.setattr(parts.flashinfer_capability, "installed", lambda: "0.7.2.post1")
    assert set(parts.compiling(False)) == {"norms and gate", "decode", "prefill"}
    asked = []
    monkeypatch.setattr(parts, "KVPool", lambda *of: of)
    monkeypatch.setattr(parts, "make_backend", lambda *of: asked.append(of))
    parts.compiling(False)["prefill"](Told(False))
    (name, spec, pool) = asked[0]
    assert name == "flashinfer" and (spec.num_heads, spec.num_kv_heads, spec.head_dim) == (32, 8, 128)
    assert pool[3] == torch.bfloat16


def test_the_tests_of_the_kernels_are_run_by_pytest(module, monkeypatch, tmp_path):
    parts = module("gpu.parts")
    (tmp_path / "test_two.py").write_text("def test_good(): pass\ndef test_bad(): assert False\n")
    monkeypatch.setattr(parts, "ROOT", tmp_path)
    monkeypatch.setattr(parts, "TESTS", ("test_two.py",))
    told = Told(False)
    parts.tests(told)
    (verdict,) = told.checks
    assert "1 failed, 1 passed" in verdict.said and not verdict.right
    assert len(verdict.notes) == 1 and "test_bad" in verdict.notes[0]
    monkeypatch.setattr(parts.importlib.util, "find_spec", lambda name: None)
    parts.tests(told)
    assert told.skipped == {"tests of the kernels": "pytest and hypothesis not installed"}


def test_a_gpu_says_what_it_is(module, monkeypatch):
    parts = module("gpu.parts")
    monkeypatch.setattr(parts.CudaDevice, "problem", lambda index: None)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (75 * 2**30, 80 * 2**30))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H100 80GB HBM3")
    told = Told(False)
    parts.device(told)
    assert told.facts["device"] == "NVIDIA H100 80GB HBM3" and told.facts["memory"].startswith("75.0 of 80.0")
    monkeypatch.setattr(parts.CudaDevice, "problem", lambda index: "torch sees no GPU here")
    told = Told(False)
    parts.device(told)
    assert told.facts == {} and told.skipped == {"the device": "torch sees no GPU here"}


def test_what_no_kernel_covers_is_measured_while_all_rows_decode(module, monkeypatch):
    """The GPU's idle share is measured while all rows decode. A fake profiler reports a 20 % gap."""
    gpu_idle, parts = module("gpu.idle"), module("gpu.speed_parts")
    entered = []

    class Profiler:
        def __init__(self, activities):
            assert activities == [torch.profiler.ProfilerActivity.CUDA]

        def __enter__(self):
            entered.append("begin")

        def __exit__(self, *error):
            entered.append("end")

        def events(self):
            spans = ((0, 40, "CUDA"), (60, 100, "CUDA"), (0, 500, "CPU"))
            return [
                SimpleNamespace(
                    device_type=getattr(torch.autograd.DeviceType, kind),
                    time_range=SimpleNamespace(start=begin, end=end),
                )
                for begin, end, kind in spans
            ]

    monkeypatch.setattr(gpu_idle, "profile", Profiler)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: entered.append("wait"))
    monkeypatch.setitem(parts.SHAPES, "2B", module("gpu.shapes").reduced(parts.SHAPES["2B"]))
    monkeypatch.setattr(parts, "SIZES", replace(parts.DRY, budget=256))
    told = Told(False)
    parts.idle("2B", told)
    goal = told.goals["2B GPU idle in decode x64"]
    assert entered == ["wait", "begin", "wait", "end"]
    assert goal.measured == pytest.approx(0.2) and goal.fraction == pytest.approx(0.8) and not goal.met


def test_a_profiler_that_saw_nothing_is_no_idle_gpu(module):
    with pytest.raises(ValueError, match="recorded no kernel"):
        module("gpu.idle").idle_share([])
    assert module("gpu.idle").idle_share(np.array([[3.0, 3.0]]).tolist()) == 0.0
