"""Tests torch linear layers whose weights oneDNN reorders once, and the fallback to plain torch."""

import pytest
import torch
import torch.nn.functional as F

from mmengine.models.decoder import prepacked
from mmengine.models.decoder.prepacked import linear_of


@pytest.fixture(autouse=True)
def asked_anew():
    prepacked.reorders.cache_clear()
    yield
    prepacked.reorders.cache_clear()


def random(*shape, dtype=torch.bfloat16):
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


@pytest.mark.parametrize("n, k", ((1, 1), (65, 33), (512, 128)))
@pytest.mark.parametrize("biased", (False, True))
def test_bfloat16_is_near_the_exact_product(n, k, biased):
    weight, bias = random(n, k), random(n) if biased else None
    linear = linear_of(weight, bias)
    for rows in (0, 1, 7, 16, 300):
        x = random(rows, k)
        y, exact = linear(x), F.linear(x.double(), weight.double(), bias.double() if biased else None)
        assert y.shape == (rows, n) and y.dtype == torch.bfloat16
        assert ((y.double() - exact).abs() <= 2**-8 * exact.abs() + 1e-4).all()


def test_weights_are_reordered_if_torch_can(monkeypatch):
    if not prepacked.reorders():
        pytest.skip("this torch or this CPU has no bfloat16 in oneDNN")
    monkeypatch.setattr(F, "linear", None)
    linear_of(random(8, 4))(random(2, 4))
    with pytest.raises(TypeError):
        linear_of(random(8, 4, dtype=torch.float32))(random(2, 4, dtype=torch.float32))


def without_onednn(monkeypatch):
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)


def without_the_operation(monkeypatch):
    def missing(_, name):
        raise AttributeError(name)

    monkeypatch.setattr(prepacked.torch.ops, "mkldnn", type("Ops", (), {"__getattr__": missing})())


def with_a_wrong_product(monkeypatch):
    class Ops:
        _is_mkldnn_bf16_supported = staticmethod(lambda: True)
        _reorder_linear_weight = staticmethod(lambda weight, rows: weight)
        _linear_pointwise = staticmethod(lambda x, *rest: x)

    monkeypatch.setattr(prepacked.torch.ops, "mkldnn", Ops())


@pytest.mark.parametrize("lacking", (without_onednn, without_the_operation, with_a_wrong_product))
def test_plain_torch_is_the_fallback(monkeypatch, lacking):
    lacking(monkeypatch)
    assert not prepacked.reorders()
    weight, bias, x = random(65, 33), random(65), random(5, 33)
    assert torch.equal(linear_of(weight, bias)(x), F.linear(x, weight, bias))


def test_float32_is_torch_itself():
    weight, x = random(65, 33, dtype=torch.float32), random(5, 33, dtype=torch.float32)
    assert torch.equal(linear_of(weight)(x), F.linear(x, weight))
