"""Tests that a vision tower selects working kernels, with results that equal torch's."""

from types import SimpleNamespace

import pytest
import torch

from mmengine.gpu import vision_ops
from mmengine.gpu.vision_ops import VisionOps, attend_by_frames, gives_known_numbers, rotate

CPU = torch.device("cpu")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("head_dim", [8, 64, 72])
def test_the_rotation_equals_torch(head_dim, dtype, kernel_device):
    from mmengine.gpu.text_kernels import rotate as ours

    assert gives_known_numbers(VisionOps(ours, attend_by_frames), kernel_device, dtype, head_dim)


def test_wrong_or_failing_kernels_are_detected():
    def breaks(*of):
        raise RuntimeError("no kernel image is available for execution on the device")

    def shifted(qk, cos, sin):
        rotate(qk, cos, -sin)

    def across(q, k, v, starts, longest):
        return attend_by_frames(q, k, v, starts[[0, -1]], longest)

    def lost_by_an_empty_frame(q, k, v, starts, longest):
        return attend_by_frames(q, k, v, starts, longest) / starts.diff().min().sign()

    assert gives_known_numbers(VisionOps(rotate, attend_by_frames), CPU, torch.float32, 64)
    for wrong in (
        VisionOps(shifted, attend_by_frames),
        VisionOps(rotate, across),
        VisionOps(rotate, breaks),
        VisionOps(rotate, lost_by_an_empty_frame),
        VisionOps(lambda *of: None, attend_by_frames),
        VisionOps(rotate, lambda *of: attend_by_frames(*of) * torch.nan),
    ):
        assert not gives_known_numbers(wrong, CPU, torch.float32, 64)


def test_the_varlen_call_fits_torchs_signature(monkeypatch):
    """The call fits torch's real signature. A fake replaces the attention itself, because torch's attention
    needs a GPU.
    """
    varlen = pytest.importorskip("torch.nn.attention.varlen")
    from inspect import signature

    known = signature(varlen.varlen_attn)

    def varlen_attn(*of, **by_name):
        given = SimpleNamespace(**known.bind(*of, **by_name).arguments)
        assert given.cu_seq_q.dtype == torch.int32 and torch.equal(given.cu_seq_q, given.cu_seq_k)
        assert given.max_q == given.max_k >= int(given.cu_seq_q.diff().max())
        return attend_by_frames(given.query, given.key, given.value, given.cu_seq_q, given.max_q)

    monkeypatch.setattr(varlen, "varlen_attn", varlen_attn)
    assert gives_known_numbers(VisionOps(rotate, vision_ops.attend_at_once), CPU, torch.float32, 64)


def test_a_cpu_and_float32_have_none():
    assert vision_ops.vision_ops(CPU, torch.bfloat16, 64) is None
    assert vision_ops.vision_ops(torch.device("cuda"), torch.float32, 64) is None
