"""Tests the option `quantize`, which quantises weights during loading, and the option `activations`."""

import pytest
import torch
from safetensors.torch import save_file

from mmengine import Engine, EngineConfig
from mmengine.checkpoint.model_files import model_tensors
from mmengine.cli.run_options import Model
from mmengine.errors import ConfigError, ModelError
from mmengine.models import reader
from mmengine.models.quantising import CODINGS, quantise
from mmengine.models.reader import open_reader
from mmengine.native import library
from mmengine.native.linear import PackedLinear
from tests.llama.tiny import make_tiny
from tests.models.fp8_folder import to_fp8

CPU = torch.device("cpu")
NAMES = ("a.q_proj.weight", "b.k_proj.weight")
needs_kernels = pytest.mark.skipif(library.load() is None, reason="needs the compiled kernels")


def drawn(*shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("form, error", (("int8", 0.006), ("fp8", 0.035)))
def test_weights_are_near(form, error):
    weight = drawn(70, 200) * torch.logspace(-3, 0, 70)[:, None]
    coding = CODINGS[form]
    codes = quantise(weight, coding)
    values = codes.values.view(torch.float8_e4m3fn) if form == "fp8" else codes.values
    found = values.float() * codes.scales.repeat_interleave(coding.group, 1)[:, :200]
    for rows in (slice(0, 16), slice(64, 70)):
        assert (found - weight)[rows].norm() < error * weight[rows].norm()
    largest = (
        codes.values.view(torch.uint8).bitwise_and(0x7F).max() if form == "fp8" else codes.values.abs().max()
    )
    assert largest == (0x7E if form == "fp8" else 127)
    if form == "fp8":  # Kernels decode faster if 16 rows share a scale.
        assert torch.equal(codes.scales[16:32], codes.scales[16].expand(16, -1))


def test_zeros_stay_zeros():
    for coding in CODINGS.values():
        codes = quantise(torch.zeros(3, 40), coding)
        assert not codes.values.any() and not codes.scales.any()


@needs_kernels
@pytest.mark.parametrize("value", (float("nan"), float("inf"), -float("inf")))
@pytest.mark.parametrize("form", CODINGS)
def test_nan_is_refused(tmp_path, form, value):
    weight = drawn(40, 64)
    weight[7, 33] = value
    save_file({NAMES[0]: weight}, tmp_path / "model.safetensors")
    entries = model_tensors(tmp_path, lambda name: name)
    with (
        open_reader(entries, CPU, torch.bfloat16, quantize=CODINGS[form]) as weights,
        pytest.raises(ModelError, match=r"a\.q_proj\.weight holds a value that is not finite"),
    ):
        list(weights.held(NAMES[0]).chunks)


@needs_kernels
@pytest.mark.parametrize("form", CODINGS)
@pytest.mark.parametrize("piece", (64, 64 * 20, 2**22))
def test_pieces_make_no_difference(tmp_path, monkeypatch, form, piece):
    save_file({NAMES[0]: drawn(70, 64), NAMES[1]: drawn(30, 64)}, tmp_path / "model.safetensors")
    entries = model_tensors(tmp_path, lambda name: name)

    def rows():
        with open_reader(entries, CPU, torch.bfloat16, quantize=CODINGS[form]) as weights:
            return PackedLinear(library.load(), weights.held(*NAMES)).rows(torch.arange(100))

    whole = rows()
    monkeypatch.setattr(reader, "PIECE_VALUES", piece)
    assert torch.equal(rows(), whole)


@needs_kernels
@pytest.mark.parametrize("form", CODINGS)
def test_a_model_answers(tmp_path, form):
    """The weights' format is reported and is part of the log's fingerprints. With int8, the first tokens
    equal the unquantised model's.
    """
    make_tiny(tmp_path)
    said = []
    for quantize in ("none", form):
        config = EngineConfig(quantize=quantize)
        with Engine(
            tmp_path, device="cpu", dtype="bfloat16", config=config, log=tmp_path / quantize
        ) as engine:
            said.append([each.token_ids for each in engine.generate(["a b", "b c d"], max_tokens=1)])
            names = {"none": "", "int8": "int8", "fp8": "FP8"}
            assert engine.built.spec.weights_held == names[quantize]
            fingerprints = engine.built.core._started.fingerprints
            assert fingerprints["dtype"] == ("bfloat16" if quantize == "none" else f"bfloat16/{form}")
    assert form == "fp8" or said[0] == said[1]


@needs_kernels
def test_int8_needs_bfloat16_and_unquantised_weights(tmp_path):
    make_tiny(tmp_path)
    for dtype, config in (("float32", {}), ("bfloat16", {"tensor_parallel": 2})):
        with pytest.raises(ConfigError, match="quantize int8 holds weights as codes on one CPU in bfloat16"):
            Engine(tmp_path, device="cpu", dtype=dtype, config=EngineConfig(quantize="int8", **config))
    to_fp8(tmp_path)
    with pytest.raises(ModelError, match="are quantised already; remove quantize int8"):
        Engine(tmp_path, device="cpu", config=EngineConfig(quantize="int8"))


@needs_kernels
def test_activations_in_int8(tmp_path):
    """Int8 activations are reported, are part of the log's fingerprints, and require integer weights."""
    make_tiny(tmp_path)
    config = EngineConfig(quantize="int8", activations="int8")
    with Engine(tmp_path, device="cpu", dtype="bfloat16", config=config, log=tmp_path / "log") as engine:
        assert len(engine.generate(["a b"], max_tokens=3)[0].token_ids) == 3
        assert engine.built.spec.weights_held == "int8, int8 activations (outside parity)"
        assert engine.built.core._started.fingerprints["dtype"] == "bfloat16/int8/activations int8"
    for config, error in (
        (EngineConfig(activations="int8"), r"but this model has none \(bfloat16\); add quantize int8"),
        (EngineConfig(quantize="fp8", activations="int8"), r"but this model has none \(FP8\)"),
    ):
        with pytest.raises(ModelError, match=error):
            Engine(tmp_path, device="cpu", dtype="bfloat16", config=config)
    with pytest.raises(ConfigError, match="activations int8 holds weights as codes on one CPU in bfloat16"):
        Engine(tmp_path, device="cpu", dtype="float32", config=EngineConfig(activations="int8"))


def test_the_options_are_settings():
    config = Model(quantize="int8", activations="int8").config(keeps_media=True, kept_of_log=[])
    assert (config.quantize, config.activations) == ("int8", "int8")
    assert Model(quantize="fp8").config(keeps_media=True, kept_of_log=[]).quantize == "fp8"
