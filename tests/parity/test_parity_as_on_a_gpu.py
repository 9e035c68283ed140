"""Tests the GPU code path on a CPU: fused decoder operations, packed images, and Triton sampling kernels.

Greedy tokens equal the tokens from transformers' `generate`, and sampled tokens equal the CPU sampler's
tokens.
"""

from dataclasses import replace

import pytest
from parity_cases import Runner

from mmengine.gpu import text_ops, vision_ops
from mmengine.models import network
from mmengine.models.decoder.fused_text import FusedTextDecoder
from mmengine.models.vision import tower
from mmengine.request import SamplingParams
from mmengine.runtime.sampling import masking, sampler

SAMPLED = SamplingParams(seed=7, temperature=4.0, top_k=30, top_p=0.95, min_p=0.001)
BY_MASS = SamplingParams(seed=8, temperature=5.0, top_p=0.9)


def make_runner(patch):
    """Return a runner whose model is built as for a GPU."""
    packed = vision_ops.VisionOps(vision_ops.rotate, vision_ops.attend_by_frames)
    patch.setattr(tower, "vision_kernels", lambda *of: None)
    patch.setattr(tower, "vision_ops", lambda *of: packed)
    ops = text_ops.torch_ops()
    patch.setattr(network, "text_decoder", lambda *of: FusedTextDecoder(*of[:3], ops))
    runner = Runner(attention="torch")
    assert type(runner.network._text) is FusedTextDecoder
    return runner


def test_tokens_equal_generate_as_on_a_gpu(cases, wanted, monkeypatch):
    runner = make_runner(monkeypatch)
    core = runner.engine(runner.config(token_budget=64, max_num_seqs=16, max_in_flight=2))
    assert runner.run(core, cases) == wanted
    core.close()


def test_triton_tokens_equal_cpu_tokens(cases, monkeypatch, kernel_device):
    if kernel_device.type != "cpu":
        pytest.skip("the engine computes on a CPU here")
    from mmengine.gpu import sampling_kernels

    some, plain = [replace(case, max_tokens=6) for case in cases[:4]], Runner()
    with monkeypatch.context() as patch:
        runner = make_runner(patch)
        for module in (sampler, masking):
            patch.setattr(module, "sampling_kernels", lambda device: sampling_kernels)
        drawn = [runner.run(runner.engine(runner.config()), some, sampling=one) for one in (SAMPLED, BY_MASS)]
    for sampling, tokens in zip((SAMPLED, BY_MASS), drawn, strict=True):
        assert tokens == plain.run(plain.engine(plain.config()), some, sampling=sampling)
    assert drawn[0] != drawn[1]
