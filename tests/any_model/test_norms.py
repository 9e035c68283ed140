"""Tests which norm modules the CPU kernel replaces, and that the results are equal."""

import pytest
import torch
from torch import nn
from transformers.models.cohere.modeling_cohere import CohereLayerNorm
from transformers.models.gemma2.modeling_gemma2 import Gemma2RMSNorm
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssRMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.olmo2.modeling_olmo2 import Olmo2RMSNorm
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextRMSNormGated

from mmengine.native.library import load
from mmengine_transformers.norms import FusedNorm, fuse_norms

CPU = torch.device("cpu")
SIZE = 72
BOTH = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])


@pytest.fixture(autouse=True)
def needs_kernels():
    if load() is None:
        pytest.skip("there are no kernels on this machine")


class Doubled(LlamaRMSNorm):
    """A subclass of an RMS norm with different results."""

    def forward(self, x):
        return 2 * super().forward(x)


def block(kind, dtype):
    norm = kind(SIZE, eps=1e-5)
    with torch.no_grad():
        norm.weight.copy_(torch.randn(SIZE, generator=torch.Generator().manual_seed(1)))
    return nn.Sequential(norm.to(dtype)).requires_grad_(False)


@BOTH
@pytest.mark.parametrize("kind", [LlamaRMSNorm, Gemma2RMSNorm, GptOssRMSNorm, Olmo2RMSNorm])
def test_norms_of_known_kinds_are_replaced_and_equal(kind, dtype):
    own, fused = block(kind, dtype), block(kind, dtype)
    assert fuse_norms(fused, CPU, dtype) == 1
    assert isinstance(fused[0], FusedNorm)
    x = torch.randn(2, 9, 3, SIZE, generator=torch.Generator().manual_seed(2)).to(dtype)
    for rows in (x, x.transpose(1, 2), x[..., :0, :]):
        found, wanted = fused(rows), own(rows)
        assert found.shape == wanted.shape
        torch.testing.assert_close(found, wanted, rtol=2**-7 if dtype == torch.bfloat16 else 2e-6, atol=1e-6)


@BOTH
@pytest.mark.parametrize("kind", [Doubled, CohereLayerNorm, Qwen3NextRMSNormGated, nn.LayerNorm])
def test_other_norms_stay(kind, dtype):
    assert fuse_norms(block(kind, dtype), CPU, dtype) == 0


def test_calls_in_another_dtype_go_to_the_module():
    fused = block(LlamaRMSNorm, torch.bfloat16)
    fuse_norms(fused, CPU, torch.bfloat16)
    assert fused(torch.randn(2, SIZE)).dtype == torch.float32
