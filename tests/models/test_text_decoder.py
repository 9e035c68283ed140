"""Tests the three text decoders (torch, CPU kernels, GPU) against transformers' logits, for all biases, norms
and rotary options.
"""

import json
import threading
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mmengine.checkpoint.fields import Fields
from mmengine.checkpoint.rope import RopeConfig, read_rope
from mmengine.errors import ModelError
from mmengine.gpu.text_ops import torch_ops
from mmengine.models import network
from mmengine.models.decoder.fused_text import FusedTextDecoder
from mmengine.models.decoder.native_text import NativeTextDecoder
from mmengine.models.decoder.rotary import inverse_frequencies
from mmengine.models.decoder.text import TextDecoder
from mmengine.models.network import load_network
from mmengine.models.sharding import Shard
from mmengine.native import library
from mmengine.runtime.attention.native_paged import NativePagedAttention
from mmengine.runtime.attention.torch_paged import TorchPagedAttention
from tests.models.config_fields import Noted, ignored
from tests.models.text_reference import (
    KINDS,
    NAMES,
    describe,
    described,
    make_prompts,
    make_reference,
    reference_logits,
    run_prompts,
)
from tests.qwen3_vl.qwen3_vl_reference import DenseAttention, PagedRows, ragged_steps

TOLERANCE = 1e-4
FORMS = {"torch": TextDecoder, "kernels": NativeTextDecoder, "as on a GPU": FusedTextDecoder}


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Return, for each kind, the checkpoint's folder and its transformers model."""
    folders = {name: tmp_path_factory.mktemp("text") for name in KINDS}
    return {name: (folder, make_reference(folder, KINDS[name], seed=2)) for name, folder in folders.items()}


def load(folder, form, dtype="float32"):
    """Load the model with the decoder that `form` names, a key of FORMS."""
    if form == "kernels" and library.load() is None:
        pytest.skip(library.describe())
    with pytest.MonkeyPatch.context() as patch:
        if form == "torch":
            patch.setattr(network.native, "load", lambda: None)
        elif form == "as on a GPU":
            ops = torch_ops()
            patch.setattr(network, "text_decoder", lambda *of: FusedTextDecoder(*of[:3], ops))
        model = load_network(folder, described(folder), NAMES, device="cpu", dtype=dtype)
    assert type(model._text) is FORMS[form]
    return model


def attention_of(model, form, count):
    """Return the attention for a decoder. The torch decoder gets dense attention. The other decoders get the
    runtime's backend, because these decoders may call the backend's optional methods.
    """
    if form == "torch":
        return DenseAttention()
    if form == "kernels":
        kernels = library.load()
        return PagedRows(lambda *of: NativePagedAttention(*of, kernels), model.spec, model.dtype, count)
    return PagedRows(TorchPagedAttention, model.spec, model.dtype, count)


def logits_of(model, form, prompts, largest=None):
    """Return each prompt's logits. All prompts are computed in one step or, if `largest` is given, in ragged
    steps with chunks of up to `largest` tokens."""
    steps = [[(row, len(ids)) for row, ids in enumerate(prompts)]]
    if largest is not None:
        rows = [type("Ids", (), {"ids": ids}) for ids in prompts]
        steps = ragged_steps(rows, np.random.default_rng(largest), largest)
    return run_prompts(model, prompts, steps, attention_of(model, form, len(prompts)))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("kind", KINDS)
def test_logits_are_transformers(made, kind, form):
    folder, reference = made[kind]
    model, prompts = load(folder, form), make_prompts(3)
    wanted = [reference_logits(reference, ids) for ids in prompts]
    assert all(logits.std() > 1000 * TOLERANCE for logits in wanted), "the logits vary too little"
    for largest in (None, 1, 9):
        found = logits_of(model, form, prompts, largest)
        for mine, theirs in zip(found, wanted, strict=True):
            assert (mine - theirs).abs().max() < TOLERANCE


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("kind", ["plain", "llama3", "all biases", "norms of q and k"])
def test_bfloat16_is_as_near_as_its_rounding_allows(made, kind, form):
    """The decoder's root mean square error is below transformers' own bfloat16 rounding error. The decoder is
    compared with transformers in bfloat16. The GPU's decoder rounds less often, so it is compared with
    transformers in float32.
    """
    folder, exact = made[kind]
    model, prompts = load(folder, form, "bfloat16"), make_prompts(4)
    rounded = type(exact).from_pretrained(folder, dtype=torch.bfloat16).eval()
    for largest in (None, 9):
        mine = torch.cat(logits_of(model, form, prompts, largest))
        theirs, truth = (torch.cat([reference_logits(of, ids) for ids in prompts]) for of in (rounded, exact))
        ours = (mine - (truth if form == "as on a GPU" else theirs)).square().mean().sqrt()
        assert ours < (theirs - truth).square().mean().sqrt()


def test_the_scaling_of_frequencies_matters_here(made):
    """Without the llama3 scaling, logits differ clearly, so the tests above would notice a wrong scaling."""
    folder, reference = made["llama3"]
    config = described(folder)
    plain = replace(config, text=replace(config.text, rope=RopeConfig(config.text.rope.theta)))
    model = load_network(folder, plain, NAMES, device="cpu", dtype="float32")
    (mine,) = run_prompts(model, make_prompts(3)[2:3], [[(0, 70)]], DenseAttention())
    assert (mine - reference_logits(reference, make_prompts(3)[2])).abs().max() > 0.1


ROPES = st.one_of(
    st.just({"rope_type": "default"}),
    st.fixed_dictionaries({"rope_type": st.just("linear"), "factor": st.floats(1, 64)}),
    st.fixed_dictionaries(
        {
            "rope_type": st.just("llama3"),
            "factor": st.floats(1, 64),
            "low_freq_factor": st.floats(0.5, 2),
            "high_freq_factor": st.floats(2.5, 8),
            "original_max_position_embeddings": st.integers(16, 16384),
        }
    ),
)


@settings(max_examples=60)
@given(words=ROPES, theta=st.sampled_from([1e4, 5e5, 1e6]), head_dim=st.sampled_from([16, 24, 64, 128]))
def test_frequencies_are_transformers_to_the_bit(words, theta, head_dim):
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    words = words | {"rope_theta": theta}
    config = LlamaConfig(head_dim=head_dim, rope_parameters=words, max_position_embeddings=2**20)
    rope = read_rope(Fields({"rope_parameters": words}, Path("config.json"), ""), head_dim)
    wanted = LlamaRotaryEmbedding(config).inv_freq
    assert torch.equal(inverse_frequencies(rope, head_dim), wanted)


@pytest.mark.parametrize("kind", ["yarn", "dynamic", "longrope", 7])
def test_another_scaling_is_refused_by_name(tmp_path, kind):
    make_reference(tmp_path)
    path = tmp_path / "config.json"
    path.write_text(path.read_text().replace('"default"', f'"{kind}"'))
    with pytest.raises(ModelError, match=f"rope_type is .*{kind}"):
        described(tmp_path)


class Sums:
    """An all-reduce for ranks that are threads of one process."""

    def __init__(self, size):
        self._parts, self._barrier = [None] * size, threading.Barrier(size)

    def of_rank(self, rank):
        def all_reduce(x):
            self._parts[rank] = x
            self._barrier.wait()
            total = sum(self._parts[1:], self._parts[0])
            self._barrier.wait()
            return total

        return all_reduce


@pytest.mark.parametrize("kind", ["plain", "tied", "all biases", "biases of q, k and v", "norms of q and k"])
def test_two_ranks_give_the_logits_of_one(made, kind):
    """The logits from two ranks equal transformers'. Only one rank may add a bias that is not sharded."""
    folder, reference = made[kind]
    sums, found, prompts = Sums(2), {}, make_prompts(5, (40,))

    def run(rank):
        shard = Shard(rank, 2, sums.of_rank(rank))
        model = load_network(folder, described(folder), NAMES, device="cpu", dtype="float32", shard=shard)
        assert (model.spec.num_heads, model.spec.num_kv_heads) == (2, 1)
        attention = DenseAttention()
        attention.begin([(0, 40)])
        with torch.inference_mode():
            places = torch.arange(40).expand(3, -1)
            found[rank] = model.forward(model.embed(prompts[0]), None, places, attention)
            if shard.leads:
                found["logits"] = model.logits(found[rank])

    ranks = [threading.Thread(target=run, args=(rank,)) for rank in range(2)]
    for each in ranks:
        each.start()
    for each in ranks:
        each.join(60)
    assert torch.equal(found[0], found[1])
    assert (found["logits"] - reference_logits(reference, prompts[0])).abs().max() < TOLERANCE


def test_a_text_models_spec(made):
    folder, _ = made["plain"]
    model = load(folder, "torch")
    assert (model.spec.patch_width, model.spec.num_deepstack, model.spec.has_encoder) == (0, 0, False)
    with pytest.raises(ModelError, match="no vision tower"):
        model.encode(torch.zeros(4, 0, dtype=torch.uint8), [(1, 2, 2)])


@pytest.mark.parametrize(
    "change, words",
    [
        ({"num_key_value_heads": 3}, "config.json: 4 heads cannot be shared by 3 key-value heads"),
        ({"head_dim": 15}, "head_dim 15 is odd"),
        ({"head_dim": None, "hidden_size": 4}, "head_dim is 1; it must be an integer from 2"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu' is not supported, only silu"),
        ({"layer_types": ["chunked_attention"] * 3}, "layer_types is ['chunked_attention'"),
        ({"layer_types": "full_attention"}, "layer_types is 'full_attention'"),
        ({"use_sliding_window": True, "sliding_window": 64}, "sliding_window 64 needs"),
    ],
)
def test_an_unsupported_config_is_refused(made, change, words):
    path = made["plain"][0] / "config.json"
    with pytest.raises(ModelError) as refused:
        describe(Fields(json.loads(path.read_text()) | change, path, ""))
    assert words in str(refused.value)


@pytest.mark.parametrize("kind", ["all biases", "biases of q, k and v", "norms of q and k"])
def test_no_field_is_ignored_that_transformers_reads(made, kind):
    path, asked = made[kind][0] / "config.json", set()
    describe(Fields(Noted(json.loads(path.read_text()), asked), path, ""))
    assert not ignored(KINDS[kind].architecture.lower(), asked)


@pytest.mark.parametrize("flag", ({}, {"use_sliding_window": False}))
def test_an_unused_window_is_ignored(made, flag):
    path = made["plain"][0] / "config.json"
    unused = json.loads(path.read_text()) | {"sliding_window": 4096} | flag
    assert describe(Fields(unused, path, "")) == described(path.parent)


def test_a_tensor_that_the_description_does_not_have_is_refused(made):
    folder, _ = made["all biases"]
    config = described(folder)
    unbiased = replace(config, text=replace(config.text, mlp_bias=False))
    with pytest.raises(ModelError, match=r"mlp\.\w+_proj\.bias does not belong"):
        load_network(folder, unbiased, NAMES, device="cpu", dtype="float32")
