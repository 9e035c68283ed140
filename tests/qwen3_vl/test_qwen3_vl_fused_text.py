"""Tests that the fused decoder gives the plain decoder's logits, with torch's operations and with our
kernels.
"""

from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from qwen3_vl_reference import (
    DECODER_KINDS,
    PagedRows,
    make_prompt,
    make_reference,
    ragged_steps,
    run_rows,
)

from mmengine.gpu import text_ops
from mmengine.models import network
from mmengine.models.decoder.fused_text import FusedTextDecoder
from mmengine.models.decoder.text import TextDecoder
from mmengine.models.plugin import AuxHiddenStates
from mmengine.runtime.attention import registry
from mmengine.runtime.attention.torch_paged import TorchPagedAttention
from mmengine_qwen3_vl import plugin

PARTS = ([17], [3, ("image", (4, 6)), 5], [2, ("image", (2, 8)), 1, ("video", (3, 4, 4)), 6], [1])


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    made = {name: tmp_path_factory.mktemp("fused") for name in DECODER_KINDS}
    for name, folder in made.items():
        make_reference(folder, seed=3, **DECODER_KINDS[name])
    return made


def load(folder, dtype, make):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            network, "text_decoder", lambda config, weights, where, *_: make(config, weights, where)
        )
        return plugin.load_model(folder, device="cpu", dtype=dtype)


def fused(folder, dtype, ops):
    return load(folder, dtype, lambda config, weights, where: FusedTextDecoder(config, weights, where, ops))


def logits_of(model, prompts, attention):
    steps = ragged_steps(prompts, np.random.default_rng(6), 7)
    with torch.inference_mode():
        return run_rows(model, prompts, steps, attention)


def runs_of(folder, dtype, ops):
    """Yield three tensors of logits for the same prompts in ragged steps. The first is from the plain
    decoder. The second and third are from the fused decoder. For the second, the decoder's operations write
    to the KV cache. For the third, the attention backend writes to the KV cache.
    """
    rng = np.random.default_rng(5)
    prompts = [make_prompt(parts, rng) for parts in PARTS]
    model = fused(folder, dtype, ops)
    yield torch.cat(logits_of(load(folder, dtype, TextDecoder), prompts, None))
    for hide in ((), ("cache_of",)):
        attention = PagedRows(TorchPagedAttention, model.spec, model.dtype, len(prompts), hide=hide)
        assert hasattr(attention, "cache_of") is not bool(hide)
        yield torch.cat(logits_of(model, prompts, attention))


def check(folder, ops):
    wanted, *got = runs_of(folder, "float32", ops)
    assert wanted.std() > 0.5
    for logits in got:
        assert (logits - wanted).abs().max() < 1e-4 and (logits - wanted).abs().mean() < 1e-5


@pytest.mark.parametrize("name", DECODER_KINDS)
def test_logits_equal_the_plain_decoder(folders, name):
    check(folders[name], text_ops.torch_ops())


@pytest.mark.parametrize("name", DECODER_KINDS)
def test_bfloat16_is_as_near_to_float32(folders, name):
    """Both decoders have about the same error against float32, though they round in different operations."""
    exact = next(runs_of(folders[name], "float32", text_ops.torch_ops()))
    plain, *got = ((each - exact).abs() for each in runs_of(folders[name], "bfloat16", text_ops.torch_ops()))
    for gaps in got:
        assert gaps.mean() < 1.1 * plain.mean() and gaps.max() < 1.5 * plain.max()


def test_our_kernel_changes_no_logits(folders, kernel_device):
    if kernel_device.type != "cpu":
        pytest.skip("the decoder lies on a CPU here; the kernel itself is tested beside torch")
    _, functions = text_ops.our_rotation()
    check(folders["odd sizes, one key-value head"], replace(text_ops.torch_ops(), **functions))


def test_taps_equal_the_plain_decoder(folders):
    rows = []
    for make in (
        TextDecoder,
        lambda config, weights, where: FusedTextDecoder(config, weights, where, text_ops.torch_ops()),
    ):
        model = load(folders["tied"], "float32", make)
        embeds = model.embed(torch.arange(6))
        deepstack = torch.randn(2, *embeds.shape, generator=torch.Generator().manual_seed(1))
        before = embeds.clone(), deepstack.clone()
        aux_hidden_states = AuxHiddenStates((0, 1, 2, 3), torch.full((6, 4 * 48), torch.nan))
        attention = PagedRows(TorchPagedAttention, model.spec, model.dtype, 1)
        attention.begin([(0, 6)])
        with torch.inference_mode():
            model.forward(embeds, deepstack, torch.arange(6).expand(3, 6), attention, aux_hidden_states)
        assert torch.equal(embeds, before[0]) and torch.equal(deepstack, before[1])
        rows.append(aux_hidden_states.rows)
    assert (rows[0] - rows[1]).abs().max() < 1e-4


@pytest.mark.parametrize("dtype", [pytest.param("float32", marks=pytest.mark.soak), "float16"])
def test_bits_do_not_depend_on_the_batch(folders, dtype, kernel_device, dots_in_order):
    """Rows have the same bits alone, in random chunks with random neighbours, and in chunks of three tokens
    (like drafts). Only row 1 has an image, so steps without row 1 have no deepstack input.
    """
    if kernel_device.type != "cpu":
        pytest.skip("the decoder lies on a CPU here; benchmarks/gpu/bits.py asks a GPU")
    ops = text_ops.text_ops(torch.device("cpu"), getattr(torch, dtype), batch_invariant=True)
    model = fused(folders["odd sizes, one key-value head"], dtype, ops)
    rng = np.random.default_rng(5)
    prompts = [make_prompt(parts, rng) for parts in ([4], [1, ("image", (2, 4)), 1], [11])]
    alone = [[(row, len(prompt.ids))] for row, prompt in enumerate(prompts)]
    begun = [(row, len(prompt.ids) - 3) for row, prompt in enumerate(prompts)]
    ways = ragged_steps(prompts, rng, 5), [begun, [(2, 3), (0, 3), (1, 3)]]

    def logits(steps):
        make = partial(registry.make_backend, "triton", batch_invariant=True)
        attention = PagedRows(make, model.spec, model.dtype, len(prompts))
        with torch.inference_mode():
            return torch.cat(run_rows(model, prompts, steps, attention))

    wanted = logits(alone)
    assert wanted.std() > 0.5
    for steps in ways:
        assert torch.equal(logits(steps), wanted)
