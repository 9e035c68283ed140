"""Tests the mixture-of-experts kernels against torch and transformers, for each instruction set that this CPU
has.
"""

import numpy as np
import pytest
import torch

from mmengine.models.decoder.experts import feed_forward
from mmengine.models.quantising import CODINGS, quantise
from mmengine.native.experts import Experts, PackedExperts
from mmengine.native.feed_forward import Dense, Mixture
from mmengine.native.linear import ChunkedCodes, ChunkedWeight, Codes, Form, PackedLinear

COUNT, TOP_K, HIDDEN, WIDE, SHARED = 10, 3, 72, 40, 24
DTYPES = (torch.float32, torch.bfloat16)
FORMS = {"int8": Form.INT8, "fp8": Form.FP8, "int4": Form.INT4}
OFF = {torch.float32: 5e-5, torch.bfloat16: 0.03}  # Absolute tolerance; typical values are about 1.


def drawn(dtype, shared=True, top_k=TOP_K, seed=0):
    """Return random weights for a mixture of experts."""
    random = torch.Generator().manual_seed(seed)

    def weight(*shape):
        return (torch.randn(shape, generator=random) * 2 / shape[-1] ** 0.5).to(dtype)

    more = Dense(weight(2 * SHARED, HIDDEN), weight(HIDDEN, SHARED)) if shared else None
    experts = weight(COUNT, 2 * WIDE, HIDDEN), weight(COUNT, HIDDEN, WIDE)
    gate = weight(1, HIDDEN) if shared else None
    return Mixture(weight(COUNT, HIDDEN), *experts, more, gate, top_k, True)


def in_torch(weights):
    def linear(weight):
        return None if weight is None else lambda x: torch.nn.functional.linear(x, weight)

    shared = weights.shared and Dense(*map(linear, weights.shared))
    return feed_forward(
        weights._replace(
            router=linear(weights.router), shared=shared, shared_gate=linear(weights.shared_gate)
        )
    )


def in_kernels(library, weights, held=ChunkedWeight.of):
    def packed(weight, **how):
        return None if weight is None else PackedLinear(library, weight, **how)

    shared = weights.shared and Dense(
        packed(weights.shared.gate_up, gate_up=True), packed(weights.shared.down)
    )
    return Experts(
        library,
        weights._replace(
            router=packed(weights.router),
            gate_up=PackedExperts(library, list(map(held, weights.gate_up)), gate_up=True),
            down=PackedExperts(library, list(map(held, weights.down))),
            shared=shared,
            shared_gate=packed(weights.shared_gate),
        ),
    )


def rows(count, dtype, seed=1):
    return torch.randn(count, HIDDEN, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shared", (False, True))
def test_rows_equal_torch(library, dtype, shared):
    """In bfloat16, a few rows may choose another expert, because two experts nearly tie."""
    weights = drawn(dtype, shared)
    x, residual = rows(300, dtype), rows(300, dtype, seed=2)
    experts = in_kernels(library, weights)
    off = (experts(x, residual).float() - (residual + in_torch(weights)(x)).float()).abs().amax(1)
    assert (off > OFF[dtype]).sum() <= (0 if dtype == torch.float32 else 6) and off.median() < OFF[dtype] / 2
    assert experts.hits.sum() == 300 * TOP_K and experts.hits.min() > 0
    assert torch.equal(experts(x[:0]), x[:0])


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_has_the_same_bits_in_any_batch(library, dtype):
    x = rows(1500, dtype)  # enough rows for several chunks
    experts, before = in_kernels(library, drawn(dtype)), torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        together = experts(x)
        torch.set_num_threads(1)
        for at, count in ((0, 1), (3, 17), (700, 1), (1365, 2), (1499, 1)):
            assert torch.equal(experts(x[at : at + count]), together[at : at + count])
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("top_k", (1, 2, 8))
def test_ties_are_resolved_like_topk(library, top_k):
    """The router's logits have many ties. `hits` shows which experts the kernels chose."""
    count, hidden = 128, 32
    eye = torch.eye(hidden, dtype=torch.bfloat16)
    random = torch.Generator().manual_seed(3)
    router = torch.randint(-2, 3, (count, hidden), generator=random).bfloat16() / 2
    experts = in_kernels(
        library,
        Mixture(
            router,
            torch.ones(count, 64, hidden, dtype=torch.bfloat16),
            torch.ones(count, hidden, 32, dtype=torch.bfloat16),
            None,
            None,
            top_k,
            True,
        ),
    )
    wanted = np.zeros(count, np.int64)
    for row in eye:
        logits = (row[None] @ router.T)[0]
        experts(row[None])
        np.add.at(wanted, logits.softmax(-1, dtype=torch.float32).topk(top_k).indices.numpy(), 1)
    assert np.array_equal(experts.hits, wanted)


def int4(weight):
    """Quantise a weight to 4-bit codes with a scale and a minimum for each group of 32."""
    n, k = weight.shape
    groups = torch.nn.functional.pad(weight.float(), (0, -k % 32)).unflatten(1, (-1, 32))
    low, high = groups.amin(2), groups.amax(2)
    scales = ((high - low) / 15).half().float().clamp(min=1e-3)
    codes = ((groups - low[..., None]) / scales[..., None]).round().clamp(0, 15) - 8
    return Codes(codes.flatten(1)[:, :k].to(torch.int8).contiguous(), scales, low + 8 * scales)


@pytest.mark.parametrize("form", FORMS)
def test_experts_in_codes_are_close_to_the_quantised_weights(library, form):
    weights = drawn(torch.bfloat16)

    def held(weight):
        codes = int4(weight) if form == "int4" else quantise(weight, CODINGS[form])
        group = 32 if form == "int4" else CODINGS[form].group
        return ChunkedCodes(*weight.shape, FORMS[form], group, [(0, codes)], codes.mins is not None)

    def read_back(weight):
        return PackedLinear(library, held(weight)).rows(torch.arange(len(weight)))

    meant = weights._replace(
        gate_up=torch.stack(list(map(read_back, weights.gate_up))),
        down=torch.stack(list(map(read_back, weights.down))),
    )
    x = rows(200, torch.bfloat16)
    wanted = in_kernels(library, meant)(x).float()
    off = in_kernels(library, weights, held)(x).float() - wanted
    assert off.abs().max() < 0.02 * wanted.abs().max() and off.square().mean() < 1e-4 * wanted.square().mean()
    if form == "fp8":
        assert not off.any()


def test_a_shared_expert_is_added_as_transformers_adds_it(library):
    from transformers import Qwen2MoeConfig
    from transformers.models.qwen2_moe.modeling_qwen2_moe import Qwen2MoeSparseMoeBlock

    config = Qwen2MoeConfig(
        num_experts=COUNT,
        num_experts_per_tok=TOP_K,
        hidden_size=HIDDEN,
        moe_intermediate_size=WIDE,
        shared_expert_intermediate_size=SHARED,
        norm_topk_prob=True,
        experts_implementation="grouped_mm",
    )
    block, weights = Qwen2MoeSparseMoeBlock(config), drawn(torch.float32)
    mine = {
        "gate.weight": weights.router,
        "experts.gate_up_proj": weights.gate_up,
        "experts.down_proj": weights.down,
        "shared_expert.gate_proj.weight": weights.shared.gate_up[:SHARED],
        "shared_expert.up_proj.weight": weights.shared.gate_up[SHARED:],
        "shared_expert.down_proj.weight": weights.shared.down,
        "shared_expert_gate.weight": weights.shared_gate,
    }
    block.load_state_dict(mine)
    x = rows(50, torch.float32)
    with torch.inference_mode():
        wanted = block(x[None])[0]
    for experts in (in_kernels(library, weights), in_torch(weights)):
        assert torch.allclose(experts(x), wanted, atol=1e-5)


def test_experts_of_different_shapes_are_refused(library):
    weights = drawn(torch.float32)
    with pytest.raises(ValueError, match="expert 1 and the first expert differ in shape"):
        PackedExperts(library, [ChunkedWeight.of(weights.down[0]), ChunkedWeight.of(weights.gate_up[0])])
