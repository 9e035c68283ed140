"""Tests of batch_invariant: in any batch, a request has the same tokens and logprobs as alone, bit by bit."""

import random
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import msgspec
import pytest
import torch
from repeater import Repeater

from mmengine import build
from mmengine.config import EngineConfig
from mmengine.errors import ConfigError
from mmengine.gpu import text_ops
from mmengine.models import network
from mmengine.models.decoder.fused_text import FusedTextDecoder
from mmengine.native import library
from mmengine.runtime.attention import registry, triton_paged
from mmengine.runtime.device import invariant
from mmengine.runtime.device.cuda import CudaDevice
from mmengine.runtime.executor import TorchExecutor
from mmengine.runtime.sampling import masking, sampler
from mmengine.serve.engine.engine import Engine
from tests.spec_decode.equality import Asked, drawn_alike, mixed

ALONE = {"max_num_seqs": 1, "enable_prefix_caching": False, "spec": "none"}
# Settings under which requests run together, with chunked prefill, steps in flight, drafts and preemption.
COMPANIES = (
    {"token_budget": 23, "block_size": 4, "num_blocks": 65, "admission_reserve": "none", "max_num_seqs": 20},
    {"long_prefill_token_threshold": 1, "spec": "none", "max_in_flight": 2},
    {"token_budget": 64, "num_blocks": 18, "swap_blocks": 17, "preempt_mode": "swap", "spec": "ngram"},
)
PLAIN = SimpleNamespace(attention=())  # a model with causal attention only
ON_A_GPU = SimpleNamespace(device=CudaDevice())
DRAWN = {"temperature": 2.0, "top_k": 40, "top_p": 0.9}


@pytest.fixture(scope="module", autouse=True)
def kernels():
    if library.load() is None:
        pytest.skip(f"no kernels here: {library.describe()}")


@pytest.fixture(scope="module")
def asked():
    """Return requests that report four logprobs for each token."""
    found = mixed(12, seed=5, most_tokens=40).by_id
    for name, (prepared, options) in found.items():
        sampling = msgspec.structs.replace(options.sampling, logprobs=4)
        found[name] = prepared, replace(options, sampling=sampling)
    return Asked(found)


def bits(asked, dtype, *, arrivals=None, attention="auto", **settings):
    """Run the requests and return (tokens, logprobs) for every choice, keyed by request id."""
    waiting, found = list(asked.by_id.values())[::-1], {}
    config = EngineConfig(max_model_len=256, **{"batch_invariant": True, **settings})
    with drawn_alike(), Engine(config=config, dtype=dtype, attention=attention) as engine:
        while waiting or not engine.is_idle:
            while waiting and (arrivals is None or arrivals.random() < 0.5):
                engine.submit_prepared(*waiting.pop())
            for output in engine.step():
                if output.completion is not None:
                    choices = output.completion.choices
                    found[output.request_id] = [(one.token_ids, one.logprobs) for one in choices]
    return found


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def dtype(request):
    return request.param


@pytest.fixture(scope="module")
def alone(asked, dtype):
    return bits(asked, dtype, **ALONE)


@pytest.mark.parametrize("company", range(len(COMPANIES)))
def test_other_requests_change_no_bit(asked, dtype, alone, company):
    found = bits(asked, dtype, arrivals=random.Random(company), **COMPANIES[company])
    assert found == alone


def test_without_batch_invariance_bits_may_change(asked):
    """If the results were equal here, the tests above would prove nothing."""
    one, other = (bits(asked, "float32", batch_invariant=False, **each) for each in (ALONE, COMPANIES[0]))
    assert one != other


@pytest.mark.soak
def test_other_requests_change_no_bit_as_on_a_gpu(asked, kernel_device, dots_in_order, monkeypatch):
    """Run the GPU decoder, attention and sampling in Triton's interpreter, with and without graph replay."""
    if kernel_device.type != "cpu":
        pytest.skip("this test runs the engine on a CPU, with Triton's interpreter")
    from mmengine.gpu import sampling_kernels

    ops = text_ops.text_ops(kernel_device, torch.float32, batch_invariant=True)
    monkeypatch.setattr(network, "text_decoder", lambda *of: FusedTextDecoder(*of[:3], ops))
    for module in (sampler, masking):
        monkeypatch.setattr(module, "sampling_kernels", lambda device: sampling_kernels)
    found = {}
    shortest = sorted(asked.by_id.items(), key=lambda item: len(item[1][0].prompt_token_ids))[:4]
    for (name, (prepared, options)), more in zip(shortest, ({}, DRAWN, {}, DRAWN), strict=True):
        sampling = msgspec.structs.replace(options.sampling, max_tokens=5, **more)
        found[name] = prepared, replace(options, sampling=sampling)
    few = Asked(found)
    alone = bits(few, "float32", attention="triton", **ALONE)
    for company in COMPANIES[:2]:
        assert bits(few, "float32", attention="triton", **company) == alone
    recorder = Repeater()
    monkeypatch.setattr(build, "TorchExecutor", partial(TorchExecutor, recorder=recorder))
    settings = {"max_num_seqs": 4, "spec": "suffix", "num_draft_tokens": 3, "draft_policy": "all"}
    assert bits(few, "float32", attention="triton", **settings) == alone
    assert recorder.replayed > 3


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        (
            {"attention": "torch"},
            "needs a batch-invariant attention backend: that is native on cpu, not torch",
        ),
        ({"config": {"tensor_parallel": 2}}, "cannot go with tensor_parallel 2"),
        ({"config": {"kv_dtype": "fp8"}}, "it supports float32 and bfloat16, not float8_e4m3fn"),
    ],
)
def test_incompatible_settings_are_refused(settings, says):
    config = EngineConfig(batch_invariant=True, **settings.pop("config", {}))
    with pytest.raises(ConfigError, match=says):
        Engine(config=config, **settings)


def test_batch_invariance_without_kernels_is_refused(hidden_compiler, tmp_path):
    with (
        hidden_compiler(tmp_path),
        pytest.raises(ConfigError, match="a GPU with Triton, or the CPU kernels"),
    ):
        Engine(config=EngineConfig(batch_invariant=True))


@pytest.mark.parametrize("name", ["auto", "triton"])
def test_on_a_gpu_triton_attends_in_one_tile(name, monkeypatch):
    """With `one_tile`, Triton's attention is batch-invariant. Without Triton, the setting is refused."""
    made = []
    monkeypatch.setattr(triton_paged, "TritonPagedAttention", lambda *of, **options: made.append(options))
    monkeypatch.setattr(registry.triton_capability, "unfit", lambda spec, kv: None)
    registry.make_backend(name, PLAIN, ON_A_GPU, batch_invariant=True)
    assert made == [{"one_tile": True}]
    monkeypatch.setattr(registry.triton_capability, "unfit", lambda spec, kv: "triton is not installed")
    with pytest.raises(
        ConfigError, match="needs a batch-invariant attention backend: triton is not installed"
    ):
        registry.make_backend(name, PLAIN, ON_A_GPU, batch_invariant=True)


def test_on_a_gpu_flashinfer_is_refused():
    with pytest.raises(
        ConfigError, match="that is triton on cuda, not flashinfer; change one of the two settings"
    ):
        registry.make_backend("flashinfer", PLAIN, ON_A_GPU, batch_invariant=True)


def test_on_a_gpu_sampling_needs_the_triton_kernels(monkeypatch):
    model = SimpleNamespace(batch_invariant=True)
    monkeypatch.setattr(invariant, "describe", lambda device: "torch (no driver)")
    for kernels in (None, SimpleNamespace()):
        monkeypatch.setattr(invariant, "sampling_kernels", lambda device, kernels=kernels: kernels)
        if kernels is not None:
            invariant.check_invariant(model, CudaDevice())
            continue
        with pytest.raises(ConfigError, match=r"but cuda samples by torch \(no driver\)"):
            invariant.check_invariant(model, CudaDevice())


@pytest.mark.parametrize("wanted", [False, True])
def test_on_a_gpu_the_decoder_uses_our_kernels(wanted, monkeypatch):
    """The decoder passes the setting batch_invariant on to its kernels."""
    made = []
    monkeypatch.setattr(network, "text_ops", lambda *of, **options: made.append(options))
    monkeypatch.setattr(network, "FusedTextDecoder", lambda *of: of)
    config = SimpleNamespace(delta=None, gated=False, norm_offset=0, rotary_dim=None, experts=None)
    network.text_decoder(config, None, torch.device("cuda"), torch.bfloat16, None, wanted)
    assert made == [{"batch_invariant": wanted}]
