"""Tests FP8 folders: dequantised values, refused folders, and answers."""

import json
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers.integrations.finegrained_fp8 import Fp8Dequantize

from mmengine import Engine
from mmengine.checkpoint.fingerprint import fingerprint
from mmengine.checkpoint.model_files import model_tensors
from mmengine.checkpoint.names import TensorNames
from mmengine.cli.loading import Loading
from mmengine.errors import ModelError
from mmengine.models import reader
from mmengine.models.reader import Part, open_reader
from mmengine.native import library
from mmengine.native.linear import ChunkedCodes, PackedLinear
from mmengine.testing.contract import PluginContract
from mmengine_llama import plugin
from tests.llama.tiny import make_tiny
from tests.models.fp8_folder import BLOCK, plain, quantised, to_fp8

CPU = torch.device("cpu")
NAMES = TensorNames(())


class TestFp8Llama(PluginContract):
    plugin = plugin
    refused = {
        "quantization_config.quant_method": "bitsandbytes",
        "quantization_config.activation_scheme": "static",
    }
    block = (24, 32)  # No matrix's row count is a multiple of 24.

    def make_checkpoint(self, folder):
        model = make_tiny(folder)
        model.load_state_dict(to_fp8(folder, self.block), strict=False)
        return model

    def reduced(self, made):
        """Return transformers' bfloat16 model with the dequantised weights, because transformers needs
        another package to read FP8 folders.
        """
        folder = made.folder.parent / "plain"
        made.reference.save_pretrained(folder)
        return made.reference.from_pretrained(folder, dtype=torch.bfloat16)


def drawn(*shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))


@pytest.fixture
def folder(tmp_path):
    """Return a folder with a matrix in FP8 and an unquantised tensor."""
    save_file({"a.q_proj.weight": drawn(70, 50), "norm.weight": drawn(50)}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text("{}")
    to_fp8(tmp_path, (16, 24))
    return tmp_path


def entries(folder):
    return model_tensors(folder, lambda name: name)


def changed(folder, change):
    path = folder / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path)


@pytest.mark.parametrize("scale_dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_weight_is_value_times_scale(tmp_path, monkeypatch, dtype, scale_dtype):
    save_file({"a.q_proj.weight": drawn(70, 50)}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text("{}")
    meant = to_fp8(tmp_path, (16, 24), scale_dtype)["a.q_proj.weight"]
    monkeypatch.setattr(reader, "PIECE_VALUES", 300)  # Pieces of 6 rows, while blocks have 16 rows.
    with open_reader(entries(tmp_path), CPU, dtype) as weights:
        assert torch.equal(weights.read("a.q_proj.weight"), meant.to(dtype))
    for axis, wanted in ((0, meant[35:]), (1, meant[:, 25:])):
        with open_reader(entries(tmp_path), CPU, dtype, Part(1, 2, lambda name, axis=axis: axis)) as weights:
            assert torch.equal(weights.read("a.q_proj.weight"), wanted.to(dtype))


def test_every_e4m3_code_has_its_value(tmp_path):
    values = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).reshape(16, 16)
    tensors = {"a.weight": values, "a.weight_scale_inv": torch.full((1, 1), 0.25)}
    save_file(tensors, tmp_path / "model.safetensors")
    how = {"quant_method": "fp8", "weight_block_size": [16, 16]}
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": how}))
    with open_reader(entries(tmp_path), CPU, torch.float32) as weights:
        found = weights.read("a.weight").flatten()
    # e4m3fn (Micikevicius et al., FP8 Formats for Deep Learning, 2022): bias 7, no infinities.
    for code, value in enumerate(found.tolist()):
        sign, exponent, fraction = -1 if code >> 7 else 1, code >> 3 & 15, code & 7
        if code & 127 == 127:
            assert value != value
            continue
        power = max(exponent, 1) - 7
        assert value == 0.25 * sign * (fraction / 8 + (exponent > 0)) * 2.0**power


def test_transformers_reads_the_same_config():
    values, scales = quantised(drawn(256, 384), BLOCK)
    theirs = Fp8Dequantize(SimpleNamespace())._dequantize_one(values, scales, torch.float32)
    assert torch.equal(theirs, plain(values, scales, BLOCK))


def packed(weights, *, held):
    names = ("a.q_proj.weight", "b.k_proj.weight")
    pieces = weights.held(*names) if held else weights.pieces(*names)
    assert isinstance(pieces, ChunkedCodes) == held
    return PackedLinear(library.load(), pieces)


@pytest.fixture
def joined(tmp_path):
    """Return a folder with two FP8 matrices whose row counts are not multiples of the block's rows."""
    drawings = {"a.q_proj.weight": drawn(70, 160), "b.k_proj.weight": drawn(30, 160)}
    save_file(drawings, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text("{}")
    to_fp8(tmp_path, (16, 32))
    return tmp_path


needs_kernels = pytest.mark.skipif(library.load() is None, reason="needs the compiled kernels")


@needs_kernels
@pytest.mark.parametrize("piece", [160, 160 * 7, 2**22])
@pytest.mark.parametrize(
    "part", [Part(0, 1, lambda name: None), Part(1, 2, lambda name: 0), Part(1, 5, lambda name: 1)]
)
def test_held_codes_equal_their_values(joined, monkeypatch, piece, part):
    monkeypatch.setattr(reader, "PIECE_VALUES", piece)
    with open_reader(entries(joined), CPU, torch.bfloat16, part) as weights:
        found, wanted = packed(weights, held=True), packed(weights, held=False)
    rows = torch.arange(found.c.n)
    assert torch.equal(found.rows(rows), wanted.rows(rows))


@needs_kernels
@pytest.mark.parametrize(
    "dtype, part",
    [
        (torch.float32, Part(0, 1, lambda name: None)),
        (torch.bfloat16, Part(1, 2, lambda name: 1)),  # The part begins inside a block.
    ],
)
def test_codes_that_cannot_be_held_are_dequantised(joined, dtype, part):
    with open_reader(entries(joined), CPU, dtype, part) as weights:
        assert not isinstance(weights.held("a.q_proj.weight"), ChunkedCodes)
    with open_reader(entries(joined), CPU, torch.bfloat16) as weights:
        assert isinstance(weights.held("a.q_proj.weight"), ChunkedCodes)


@needs_kernels
def test_a_nan_code_is_refused(joined):
    def spoil(tensors):
        tensors["b.k_proj.weight"].view(torch.uint8)[17, 3] = 0xFF

    changed(joined, spoil)
    with (
        open_reader(entries(joined), CPU, torch.bfloat16) as weights,
        pytest.raises(ModelError, match=r"tensor b\.k_proj\.weight holds a NaN; download it again"),
    ):
        packed(weights, held=True)


def test_scales_are_part_of_the_fingerprint(folder):
    before = fingerprint(folder, NAMES)
    changed(folder, lambda tensors: tensors["a.q_proj.weight_scale_inv"][0, 0].mul_(2))
    assert fingerprint(folder, NAMES) != before


def without(name):
    return lambda tensors: tensors.pop(name)


def instead(name, value):
    return lambda tensors: tensors.update({name: value})


WEIGHT, SCALE = "a.q_proj.weight", "a.q_proj.weight_scale_inv"


@pytest.mark.parametrize(
    "change, words",
    [
        (without(SCALE), f"{WEIGHT} is stored as F8_E4M3, but {SCALE} is missing; download"),
        (without(WEIGHT), f"{SCALE} is a scale, but its weight is not an FP8 matrix"),
        (instead(WEIGHT, drawn(70, 50)), f"{SCALE} is a scale, but its weight is not an FP8 matrix"),
        (instead(SCALE, torch.ones(5, 2)), r"shape \[5, 2\]; a weight of \[70, 50\] .* has \[5, 3\] scales"),
        (instead(SCALE, torch.ones(5, 3).half()), f"{SCALE} is stored as F16; scales are BF16 or F32"),
        (
            instead(SCALE, torch.ones(5, 3, dtype=torch.int16)),
            f"{SCALE} is stored as I16; supported are F64, F32",
        ),
        (
            instead(SCALE, torch.ones(5, 3, dtype=torch.uint8)),
            f"{SCALE} is stored as U8, but belongs to no NVFP4 matrix",
        ),
        (instead(SCALE, torch.full((5, 3), float("nan"))), f"{SCALE} holds a scale that is not finite"),
        (instead(SCALE, torch.full((5, 3), float("inf")).bfloat16()), "not finite"),
        (instead(WEIGHT, torch.ones(70).to(torch.float8_e4m3fn)), r"shape \[70\]; FP8 weights are matrices"),
        (
            instead("a.experts.down_proj", torch.ones(2, 3, 4).to(torch.float8_e4m3fn)),
            "experts.down_proj is stored as F8_E4M3, but a.experts.down_proj_scale_inv is missing; download",
        ),
    ],
)
def test_inconsistent_tensors_are_refused(folder, change, words):
    changed(folder, change)
    with pytest.raises(ModelError, match=words):
        entries(folder)


@pytest.mark.parametrize(
    "how, words",
    [
        (None, "F8_E4M3, but .*config.json has no FP8 quantization_config"),
        ({"quant_method": "quanto"}, "quant_method 'quanto' is not supported; .* are supported"),
        ({}, "quant_method None is not supported"),
        ([], "quantization_config is missing or not an object"),
        ({"quant_method": "fp8"}, "no weight_block_size"),
        ({"quant_method": "fp8", "weight_block_size": [128]}, "has 1 sizes"),
        ({"quant_method": "fp8", "weight_block_size": [0, 128]}, "weight_block_size"),
        (
            {"quant_method": "fp8", "weight_block_size": [16, 24], "activation_scheme": "static"},
            "activation_scheme 'static' is not supported, only dynamic",
        ),
    ],
)
def test_unsupported_quantisation_is_refused_by_name(folder, how, words):
    (folder / "config.json").write_text(json.dumps({"quantization_config": how}))
    with pytest.raises(ModelError, match=words):
        entries(folder)


def test_an_answer_equals_the_plain_folders(tmp_path):
    for name in ("fp8", "plain"):
        (tmp_path / name).mkdir()
        make_tiny(tmp_path / name)
    meant = to_fp8(tmp_path / "fp8")
    save_file(
        {name: value.contiguous() for name, value in meant.items()}, tmp_path / "plain/model.safetensors"
    )
    for dtype in ("float32", "bfloat16"):
        said = []
        for name in ("fp8", "plain"):
            with Engine(tmp_path / name, device="cpu", dtype=dtype) as engine:
                loading = Loading()
                loading.loaded(engine.built)
                held = "FP8" if dtype == "bfloat16" and library.load() else f"FP8 held as {dtype}"
                assert (f"weights, {held};" in loading.sizes) == (name == "fp8")
                said.append([each.token_ids for each in engine.generate(["a b", "b c d"], max_tokens=12)])
        assert said[0] == said[1] and all(said[0])
