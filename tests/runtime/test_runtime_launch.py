"""Tests that launching a step never waits for the device.

A wait would prevent the preparation of a second step while the first step runs. The fake device's tensors
have no values, and every operation that would wait for the device raises.
"""

import random
from collections import Counter
from types import SimpleNamespace

import msgspec
import numpy as np
import pytest
import torch
from fake_gpu import GPU, ON_GPU, Waited, nothing_to_wait_for, pinned
from flashinfer_fake import FakeWrapper, fake_library
from repeater import Repeater
from runtime_toy import VOCAB, Driver, ToyModel, positions_of, toy_request

from mmengine.config import EngineConfig
from mmengine.core.executor import PENDING
from mmengine.gpu import text_ops, vision_ops
from mmengine.models import network as networks
from mmengine.models.decoder.fused_text import FusedTextDecoder
from mmengine.models.vision import tower
from mmengine.request import Request, SamplingParams
from mmengine.runtime import runner as running
from mmengine.runtime.attention.flashinfer_paged import FlashInferAttention
from mmengine.runtime.attention.triton_paged import TritonPagedAttention
from mmengine.runtime.device.upload import upload
from mmengine.runtime.drafting.eagle3.loading import load_head
from mmengine.runtime.drafting.head import chain as chaining
from mmengine.runtime.drafting.head import drafter as drafting
from mmengine.runtime.sampling import masking, sampler
from mmengine.runtime.sampling.sample_rows import SampleRows
from mmengine.runtime.sampling.sampler import SampledTokens
from mmengine.spec_decode.eagle3.config import Target
from mmengine.spec_decode.eagle3.loading import open_head
from mmengine.structured_output.request.spec import grammar_of
from mmengine_qwen3_vl import plugin
from mmengine_shapes import checkpoint_path, draft_head_path
from mmengine_shapes.scenes import random_scene

OPTIONS = {
    "greedy": {},
    "drawn": {"temperature": 0.9, "seed": 1},
    "top-k": {"temperature": 0.9, "top_k": 7, "seed": 1},
    "top-p": {"temperature": 0.9, "top_p": 0.8, "seed": 1},
    "min-p": {"temperature": 0.9, "min_p": 0.1, "seed": 1},
    "penalties": {"repetition_penalty": 1.2, "presence_penalty": 0.3, "frequency_penalty": 0.1},
    "bias": {"logit_bias": {3: 2.0, 5: -1.0}},
    "early": {"min_tokens": 9, "stop_token_ids": (4,)},
    "logprobs": {"logprobs": 3},
}


@pytest.mark.parametrize(
    "waits",
    [
        lambda x: x.sum().item(),
        lambda x: x.tolist(),
        lambda x: bool((x > 0).any()),
        lambda x: x.nonzero(),
        lambda x: x[x > 0],
        lambda x: x.masked_select(x > 0),
        lambda x: torch.repeat_interleave(x.long()),
        lambda x: x.numpy(),
        lambda x: x.cpu(),
        lambda x: torch.zeros(4).copy_(x),
        lambda x: torch.ones(2, 3).to(x.device),
        lambda x: torch.ones(2).to(x.device, non_blocking=True),
        lambda x: x.copy_(torch.ones(4), non_blocking=True),
        lambda x: torch.tensor([1, 2], device=x.device),
    ],
)
@pytest.mark.parametrize("inference", [True, False])
def test_waits_are_detected(waits, inference):
    with torch.inference_mode(inference), nothing_to_wait_for():
        x = torch.empty(4, device=GPU)
        with pytest.raises((Waited, RuntimeError, NotImplementedError, TypeError)):
            waits(x)


def test_operations_without_a_wait_pass():
    with torch.inference_mode(), nothing_to_wait_for():
        x = upload(np.arange(4), GPU)
        assert x.device == GPU and x[1:].to("cpu", non_blocking=True).shape == (3,)
        x[upload(np.array([1, 2]), GPU)] = 3


class Launching:
    """An executor that launches steps and never reads their results. All its tokens are PENDING."""

    def __init__(self, model, positions, config, **options):
        with nothing_to_wait_for():
            self.runner = running.ModelRunner(model, positions, config, ON_GPU, None, AllowAll(), **options)

    def attach(self, name, media):
        self.runner.attach(name, media)

    def dispatch(self, plan):
        with nothing_to_wait_for():
            self.launched = self.runner.sample(self.runner.launch(plan, self.runner.pixels_of(plan)))
        self.plan = plan

    def collect(self):
        sampled = self.launched.sampled
        assert sampled.token_ids.device.type == "cpu" and len(sampled.token_ids) == len(self.plan.sample)

        class Result:
            token_ids = np.full(len(self.plan.sample), PENDING)  # known only to the device

        return Result


class AllowAll:
    """Fake grammar matchers whose masks allow every token."""

    def admit(self, row, request, token_ids, cut=None, *, has_repeated=False):
        pass

    def masks(self, rows, drafts=None):
        count = len(rows) + sum(map(len, drafts or ()))
        return np.full((count, -(-VOCAB // 32)), 2**32 - 1, np.uint32), {}


def toy_on_gpu():
    model = ToyModel()
    for name in ("embedding", "head", "vision", "waves"):
        setattr(model, name, getattr(model, name).to(GPU))
    for name in ("qkv", "out"):
        setattr(model, name, [weight.to(GPU) for weight in getattr(model, name)])
    return model


def config_of(**settings):
    sizes = {
        "max_num_seqs": 12,
        "num_blocks": 64,
        "block_size": 4,
        "max_model_len": 100,
        "encoder_cache_size": 64,
    }
    return EngineConfig(**{**sizes, "max_in_flight": 2, **settings})


def run(executor, config):
    """Run prompts with every sampling option, a grammar, and images in chunks, then decode steps."""
    driver = Driver(executor, config)
    for number, (name, options) in enumerate(OPTIONS.items()):
        driver.add(*toy_request(name, number, 9, sampling=SamplingParams(ignore_eos=True, **options)))
    form = grammar_of(grammar={"regex": "[ab]+"})
    driver.add(*toy_request("form", 8, sampling=SamplingParams(ignore_eos=True), grammar=form))
    driver.add(*toy_request("images", 9, media_runs=[[(2, 4)], [(8, 3), (13, 2)]]))
    texts = [*OPTIONS, "form"]
    for name in texts:
        driver.step((name, None))
        driver.step((name, None))
    driver.step(("images", 5), *((name, None) for name in texts))
    driver.step(*((name, None) for name in texts), ("images", None))
    for _ in range(2):
        driver.step(*((name, None) for name in texts), ("images", None))
    return driver


def test_no_step_waits():
    config = config_of()
    run(Launching(toy_on_gpu(), positions_of, config), config)


@pytest.fixture
def drawing_kernels(monkeypatch):
    """Replace the sampling and masking kernels with fakes that count their calls and compute nothing."""
    calls = Counter()

    def draw(logits, largest, temperature, least, keys):
        calls["draw"] += 1
        assert {each.shape for each in (largest, temperature, least)} == {logits.shape[:1]}
        assert keys.shape == (3, len(logits)) and keys.dtype == torch.int64
        return logits.new_empty(len(logits), dtype=torch.int64)

    def top_p_bound(logits, largest, temperature, top_p):
        calls["top_p_bound"] += 1
        return torch.empty_like(largest)

    def top_k_bound(best, top_k, top_p):
        calls["top_k_bound"] += 1
        assert len(best) == len(top_k) and top_k.dtype == torch.int64 and best.dtype == top_p.dtype
        return torch.empty_like(top_p)

    def log_softmax(logits):
        calls["log_softmax"] += 1
        return torch.empty_like(logits)

    def keep_allowed(logits, places, bits):
        calls["keep_allowed"] += 1
        return logits.new_empty(len(places)), torch.empty_like(places)

    functions = (draw, top_p_bound, top_k_bound, log_softmax, keep_allowed)
    kernels = SimpleNamespace(**{each.__name__: each for each in functions})
    for module in (sampler, masking):
        monkeypatch.setattr(module, "sampling_kernels", lambda device: kernels)
    return calls


def test_no_step_waits_that_draws_by_kernels(drawing_kernels):
    config = config_of()
    run(Launching(toy_on_gpu(), positions_of, config), config)
    assert len(drawing_kernels) == 5 and min(drawing_kernels.values()) > 3


def test_counting_output_with_drafts_does_not_wait():
    config = config_of()
    executor = Launching(toy_on_gpu(), positions_of, config)
    driver = Driver(executor, config)
    driver.add(*toy_request("r", 1, 9, sampling=SamplingParams(**OPTIONS["penalties"])))
    driver.step(("r", None))
    reader, rows = executor.runner._reader, executor.plan.rows.repeat(3)
    batch = SampleRows.of(reader.rows, rows, np.full(3, 10, np.int32))
    with nothing_to_wait_for():
        reader._count(
            np.array([5, 6, 7], np.int32), batch, SimpleNamespace(first=np.zeros(1, int)), np.array([2])
        )


def test_an_engine_that_is_closed_holds_no_blocks_of_a_gpu():
    executor = Launching(toy_on_gpu(), positions_of, config_of())
    storage = executor.runner._kv.layers[1].untyped_storage()
    assert storage.nbytes() > 0
    executor.runner.close()
    assert storage.nbytes() == 0


def test_copies_of_blocks_do_not_wait():
    config = config_of(swap_blocks=4)
    executor = Launching(toy_on_gpu(), positions_of, config)
    driver = Driver(executor, config)
    driver.add(*toy_request("r", 1, 9))
    driver.step(("r", None))
    pairs = {
        name: np.array(pairs, np.int32)
        for name, pairs in (("swap_out", [[5, 1], [9, 2]]), ("copy", [[3, 4]]), ("swap_in", [[1, 7]]))
    }
    for slab in executor.runner._kv._host._slabs:
        pinned(slab)
    executor.dispatch(msgspec.structs.replace(driver.plan(("r", None)), **pairs))


@pytest.fixture
def flashinfer(monkeypatch):
    """Replace FlashInfer with fake wrappers that check their calls and compute nothing."""
    monkeypatch.setattr(FakeWrapper, "plan", lambda self, *a, **o: self._bind("plan", a, o))
    monkeypatch.setattr(FakeWrapper, "run", lambda self, q, kv, out: out)
    for module in (running, drafting):
        monkeypatch.setattr(
            module, "make_backend", lambda name, spec, kv, **_: FlashInferAttention(spec, kv, fake_library())
        )


@pytest.fixture
def triton(monkeypatch):
    """Replace the Triton kernels with fakes that compute nothing."""
    kernels = SimpleNamespace(attend=lambda q, blocks, work: torch.empty_like(q))
    for module in (running, drafting):
        monkeypatch.setattr(
            module, "make_backend", lambda name, spec, kv, **_: TritonPagedAttention(spec, kv, kernels)
        )


def test_no_step_waits_with_triton_and_graphs(triton):
    config, recorder = config_of(), Repeater()
    executor = Launching(toy_on_gpu(), positions_of, config, recorder=recorder)
    run(executor, config)
    assert executor.runner.graph_counts["steps"]["replayed"] == recorder.replayed > 10


def test_no_step_waits_with_flashinfer_and_graphs(flashinfer):
    config, recorder = config_of(), Repeater()
    executor = Launching(toy_on_gpu(), positions_of, config, recorder=recorder)
    run(executor, config)
    assert executor.runner.graph_counts["steps"]["replayed"] == recorder.replayed > 10


@pytest.fixture
def fused(monkeypatch):
    """Use the GPU's decoder and vision attention."""

    def attend(q, k, v, starts, longest):
        assert starts.device == q.device and starts.dtype == torch.int32 and type(longest) is int
        return torch.empty_like(q)

    def make(*of):
        return FusedTextDecoder(*of[:3], text_ops.torch_ops())

    monkeypatch.setattr(networks, "text_decoder", make)
    monkeypatch.setattr(tower, "vision_ops", lambda *of: vision_ops.VisionOps(vision_ops.rotate, attend))


@pytest.mark.parametrize("kind", ["plain", "fused"])
def test_no_step_of_the_real_networks_waits(flashinfer, request, kind):
    if kind == "fused":
        request.getfixturevalue("fused")
    network = plugin.load_model(checkpoint_path(), device=str(GPU), dtype="float32")
    config = config_of(num_blocks=200, block_size=16, max_model_len=400)
    executor = Launching(network, plugin.positions, config, recorder=Repeater())
    driver = Driver(executor, config)
    processor = plugin.load_processor(checkpoint_path())
    image = random_scene(random.Random(0), side=96).draw()
    for name in ("one", "two"):
        parts = [{"type": "image", "image": image}, {"type": "text", "text": "What is it?"}]
        prepared = processor.prepare([{"role": "user", "content": parts if name == "one" else "Hello"}])
        asked = Request(
            name, prepared.prompt_token_ids, SamplingParams(), tuple(one.item for one in prepared.media)
        )
        driver.add(asked, prepared.media)
    driver.step(("one", None), ("two", 3))
    for _ in range(3):
        driver.step(("one", None), ("two", None))
    calls = executor.runner.graph_counts.get("encodings", {})
    assert calls["replayed"] == 1 if kind == "fused" else not calls


@pytest.mark.parametrize(
    "backend, captured",
    [("flashinfer", True), ("triton", True), ("flashinfer", False)],
    ids=["captured", "captured, triton", "launched"],
)
def test_a_chain_of_drafts_waits_once_for_all_of_them(request, monkeypatch, backend, captured):
    """Rows join, continue and leave, and have different numbers of drafts."""
    request.getfixturevalue(backend)
    network = plugin.load_model(checkpoint_path(), device=str(GPU), dtype="float32")
    spec, waits = network.spec, []
    target = Target(spec.hidden_size, spec.vocab_size, spec.num_layers)
    head = load_head(open_head(draft_head_path(), target), network, ON_GPU)

    def fetch(drafts):
        waits.append(tuple(drafts.shape))
        return np.full(drafts.shape, 5)

    monkeypatch.setattr(chaining, "fetch", fetch)
    sizes = {"num_blocks": 200, "block_size": 16, "max_model_len": 400, "max_in_flight": 1}
    config = config_of(num_draft_tokens=4, lookahead_tokens=4, **sizes)
    recorder = Repeater() if captured else None
    executor = Launching(network, plugin.positions, config, head=head, recorder=recorder)
    driver = Driver(executor, config)
    for number, name in enumerate("abc"):
        prompt = np.arange(3 + number, 9 + 2 * number, dtype=np.int32)
        driver.add(Request(name, prompt, SamplingParams(max_tokens=4 + number)))
    for names in ("a", "abc", "abc", "cb"):
        executor.dispatch(driver.plan(*((name, None) for name in names)))
        said = torch.full((len(names),), 7)
        with nothing_to_wait_for():
            launched = msgspec.structs.replace(executor.launched, sampled=SampledTokens(said, None))
            result = executor.runner.finish(launched)
        assert result.num_drafts.max() > 1
        for name in names:
            driver.known[name].append(7)
    assert len(waits) == 4 and len(set(waits)) > 1
    assert executor.runner.graph_counts.get("chains", {}) == (
        {"replayed": 4, "capture_failed": 0} if captured else {}
    )
