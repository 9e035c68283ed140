"""Tests weights in FP8 (a scale per row) and NVFP4, in the formats of compressed-tensors and ModelOpt."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from mmengine import Engine
from mmengine.checkpoint import float_codes
from mmengine.checkpoint.fingerprint import fingerprint
from mmengine.checkpoint.model_files import model_tensors
from mmengine.checkpoint.names import TensorNames
from mmengine.config import EngineConfig
from mmengine.errors import ModelError
from mmengine.models.reader import Part, open_reader
from mmengine.native import library
from mmengine.native.linear import ChunkedCodes, PackedLinear
from mmengine.testing.contract import PluginContract
from mmengine_llama import plugin
from tests.llama.tiny import make_tiny
from tests.models.float_folder import E2M1, config_of, group_config, to_float_codes
from tests.models.stacked_folder import alone
from tests.qwen3_5.tiny import make_text

CPU = torch.device("cpu")
LAYOUTS = ("compressed-tensors", "modelopt")
MATRIX = "a.q_proj.weight"
needs_kernels = pytest.mark.skipif(library.load() is None, reason="needs the compiled kernels")


class TestFp8RowsLlama(PluginContract):
    plugin = plugin
    refused = {"quantization_config.format": "marlin-24", "quantization_config.config_groups": {"a": {}}}

    def make_checkpoint(self, folder):
        model = make_tiny(folder)
        model.load_state_dict(to_float_codes(folder, "compressed-tensors", "fp8"), strict=False)
        return model

    def reduced(self, made):
        """Return transformers' bfloat16 model of the dequantised weights."""
        folder = made.folder.parent / "plain"
        made.reference.save_pretrained(folder)
        return made.reference.from_pretrained(folder, dtype=torch.bfloat16)


def drawn(*shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))


def written(folder, layout, *forms, shape=(70, 160)):
    """Write a folder with a quantised matrix and an unquantised tensor. Returns the values of the matrix."""
    save_file({MATRIX: drawn(*shape), "norm.weight": drawn(50)}, folder / "model.safetensors")
    (folder / "config.json").write_text("{}")
    return to_float_codes(folder, layout, *forms)[MATRIX]


def entries(folder):
    return model_tensors(folder, lambda name: name)


def read(folder, dtype=torch.float32, *part):
    with open_reader(entries(folder), CPU, dtype, *part) as weights:
        return weights.read(MATRIX)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("form", ["fp8", "nvfp4"])
def test_a_weight_is_code_times_scales(tmp_path, monkeypatch, form, layout, dtype):
    meant = written(tmp_path, layout, form)
    monkeypatch.setattr(float_codes, "PIECE_VALUES", 300)
    assert torch.equal(read(tmp_path, dtype), meant.to(dtype))
    assert torch.equal(read(tmp_path, dtype, Part(1, 2, lambda name: 0)), meant[35:].to(dtype))
    assert torch.equal(read(tmp_path, dtype, Part(1, 2, lambda name: 1)), meant[:, 80:].to(dtype))
    assert (meant.to(dtype) - drawn(70, 160)).abs().mean() < 0.15


@pytest.mark.parametrize("form", ["fp8", "nvfp4"])
def test_values_are_those_of_compressed_tensors(tmp_path, form):
    compressors = pytest.importorskip("compressed_tensors.compressors")
    from compressed_tensors.quantization import QuantizationScheme

    written(tmp_path, "compressed-tensors", form)
    tensors = load_file(tmp_path / "model.safetensors")
    module = MATRIX.removesuffix("weight")
    state = {name.removeprefix(module): each for name, each in tensors.items() if name.startswith(module)}
    scheme = QuantizationScheme(**group_config(form))
    compressor = compressors.BaseCompressor.get_value_from_registry(group_config(form)["format"])
    theirs = compressor.decompress(state, scheme)["weight"]
    assert theirs.dtype == torch.bfloat16
    assert torch.equal(read(tmp_path, torch.bfloat16), theirs)


def test_every_code_and_every_scale_has_its_value(tmp_path):
    """Row i has the e4m3 code i as its scale, and each group has all 16 NVFP4 codes in order."""
    scales = torch.arange(256, dtype=torch.uint8)
    scales[127], scales[255] = 0, 0  # NaN is refused.
    bytes_of = torch.tensor([low + 16 * (low + 1) for low in range(0, 16, 2)], dtype=torch.uint8)
    tensors = {
        MATRIX: bytes_of.expand(256, 8).contiguous(),
        f"{MATRIX}_scale": scales.view(torch.float8_e4m3fn)[:, None].contiguous(),
        f"{MATRIX}_scale_2": torch.tensor(0.25),
    }
    save_file(tensors, tmp_path / "model.safetensors")
    how = config_of("modelopt", ("nvfp4",))
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": how}))
    values = [*E2M1, *(-each for each in E2M1)]
    for code, row in zip(scales.tolist(), read(tmp_path).tolist(), strict=True):
        sign, exponent, fraction = -1 if code >> 7 else 1, code >> 3 & 15, code & 7
        scale = sign * (fraction / 8 + (exponent > 0)) * 2.0 ** (max(exponent, 1) - 7)
        assert row == [value * scale * 0.25 for value in values]


@pytest.mark.parametrize(
    "shape, more",
    [((70,), {}), ((70, 1), {}), ((1,), {}), ((), {}), ((5, 2), {"block_structure": [16, 80]})],
)
def test_fp8_scales_of_rows_blocks_and_the_matrix(tmp_path, shape, more):
    written(tmp_path, "compressed-tensors", "fp8")
    scales = drawn(*shape).abs() + 0.1
    changed(tmp_path, lambda tensors: tensors.update({f"{MATRIX}_scale": scales}))
    strategy = {"block_structure": [16, 80], "strategy": "block"} if more else {}
    configured(tmp_path, lambda how: how["config_groups"]["group_0"]["weights"].update(strategy))
    codes = load_file(tmp_path / "model.safetensors")[MATRIX].float()
    spread = (
        scales.reshape(-1, 1) if not more else scales.repeat_interleave(16, 0)[:70].repeat_interleave(80, 1)
    )
    assert torch.equal(read(tmp_path), codes * spread)


@needs_kernels
@pytest.mark.parametrize("shape", [(70, 160), (32, 48), (16, 300)])
def test_held_codes_equal_their_values(tmp_path, shape):
    """In bfloat16, FP8 codes stay in memory, and have exactly the values of the dequantised matrix."""
    written(tmp_path, "compressed-tensors", "fp8", shape=shape)
    with open_reader(entries(tmp_path), CPU, torch.bfloat16) as weights:
        held, plain = weights.held(MATRIX), weights.pieces(MATRIX)
        assert isinstance(held, ChunkedCodes) and weights.how_held() == "FP8"
        found, wanted = (PackedLinear(library.load(), each) for each in (held, plain))
    rows = torch.arange(shape[0])
    assert torch.equal(found.rows(rows), wanted.rows(rows))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("forms", [("fp8",), ("nvfp4",), ("nvfp4", "fp8")])
def test_answers_equal_the_plain_folders(tmp_path, layout, forms):
    """The models are a dense model and a mixture of experts, whose folder stores the experts separately."""
    for number, make in enumerate((make_tiny, make_mixture)):
        coded, plain = tmp_path / f"coded{number}", tmp_path / f"plain{number}"
        for folder in (coded, plain):
            folder.mkdir()
            make(folder)
        meant = to_float_codes(coded, layout, *forms)
        save_file({name: each.contiguous() for name, each in meant.items()}, plain / "model.safetensors")
        for dtype in ("float32", "bfloat16"):
            found = [answers(folder, dtype) for folder in (coded, plain)]
            assert found[0][0] == found[1][0] and all(found[0][0])
            assert found[0][1] == loading(dtype, forms) and found[1][1] == ""


def make_mixture(folder):
    made = make_text(folder, mixture=True, hidden_size=64, shared_expert_intermediate_size=64)
    path = folder / "model.safetensors"
    save_file(alone(load_file(path)), path, {"format": "pt"})
    return made


def answers(folder, dtype):
    config = EngineConfig(num_blocks=65, max_model_len=64, num_threads=1)
    with Engine(folder, device="cpu", dtype=dtype, config=config) as engine:
        found = engine.generate(["a b", "b c d"], max_tokens=12, ignore_eos=True)
        return [each.token_ids for each in found], engine.built.spec.weights_held


def loading(dtype, forms):
    """Return the expected `ModelSpec.weights_held`."""
    if dtype == "bfloat16" and library.load() is not None and "fp8" in forms:
        return "FP8; NVFP4 dequantised to bfloat16" if len(forms) > 1 else "FP8"
    return ", ".join(f"{name} held as {dtype}" for name in sorted(each.upper() for each in forms))


def test_a_separate_file_may_describe_the_quantisation(tmp_path):
    """Older ModelOpt folders describe the quantisation in hf_quant_config.json."""
    meant = written(tmp_path, "modelopt", "nvfp4")
    how = json.loads((tmp_path / "config.json").read_text())["quantization_config"]
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ModelError, match=f"{MATRIX} is stored as U8, but belongs to no"):
        entries(tmp_path)
    inner = {"quant_algo": how["quant_algo"], "group_size": 16, "kv_cache_quant_algo": "FP8"}
    path = tmp_path / "hf_quant_config.json"
    path.write_text(json.dumps({"producer": {"name": "modelopt"}, "quantization": inner}))
    assert torch.equal(read(tmp_path), meant)
    inner["quant_algo"] = "W4A8_AWQ"
    path.write_text(json.dumps({"quantization": inner}))
    with pytest.raises(ModelError, match="hf_quant_config.json: .*quant_algo 'W4A8_AWQ' is not supported"):
        entries(tmp_path)


@needs_kernels
def test_nvfp4_may_become_int8_at_loading(tmp_path):
    make_tiny(tmp_path)
    to_float_codes(tmp_path, "modelopt", "nvfp4")
    model = plugin.load_model(tmp_path, device="cpu", dtype="bfloat16", quantize="int8")
    assert model.spec.weights_held == "int8"


def test_scales_are_part_of_the_fingerprint(tmp_path):
    for layout in LAYOUTS:
        written(tmp_path, layout, "nvfp4")
        before = fingerprint(tmp_path, TensorNames(()))
        name = f"{MATRIX}_{'global_scale' if layout == LAYOUTS[0] else 'scale_2'}"
        changed(tmp_path, lambda tensors, name=name: tensors.update({name: tensors[name] * 2}))
        assert fingerprint(tmp_path, TensorNames(())) != before


def changed(folder, change):
    path = folder / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file({name: each.contiguous() for name, each in tensors.items()}, path)


def configured(folder, change):
    path = folder / "config.json"
    config = json.loads(path.read_text())
    change(config["quantization_config"])
    path.write_text(json.dumps(config))


def without(name):
    return lambda tensors: tensors.pop(name)


def instead(name, value):
    return lambda tensors: tensors.update({name: value})


def spoilt(name):
    def change(tensors):
        tensors[name].view(torch.uint8)[3, 2] = 0x7F

    return change


BYTES = torch.ones(70, 80, dtype=torch.uint8)
E4M3 = torch.ones(70, 10).to(torch.float8_e4m3fn)
PACKED, SCALE, GLOBAL = f"{MATRIX}_packed", f"{MATRIX}_scale", f"{MATRIX}_global_scale"
BROKEN = [
    ("nvfp4", 0, without(SCALE), f"{PACKED} has NVFP4 codes, but {SCALE} is missing; download it again"),
    ("nvfp4", 0, without(GLOBAL), f"{PACKED} has NVFP4 codes, but {GLOBAL} is missing; download it again"),
    ("nvfp4", 0, without(PACKED), f"{SCALE} is a scale, but its weight is no matrix of codes"),
    ("nvfp4", 1, without(f"{MATRIX}_scale_2"), f"{MATRIX} has NVFP4 codes, but {MATRIX}_scale_2 is missing"),
    ("nvfp4", 0, instead(PACKED, BYTES[:, :9]), r"has shape \[70, 9\]; NVFP4 codes are matrices"),
    ("nvfp4", 0, instead(PACKED, BYTES[0]), r"has shape \[80\]; NVFP4 codes are matrices"),
    ("nvfp4", 0, instead(PACKED, BYTES[:0]), r"has shape \[0, 80\]; NVFP4 codes are matrices"),
    ("nvfp4", 0, instead(PACKED, drawn(70, 80)), f"{PACKED} is stored as F32; NVFP4 codes are U8"),
    ("nvfp4", 0, instead(SCALE, E4M3[:, :5]), r"is F8_E4M3 \[70, 5\]; it must be F8_E4M3 \[70, 10\]"),
    ("nvfp4", 0, instead(SCALE, drawn(70, 10)), r"is F32 \[70, 10\]; it must be F8_E4M3 \[70, 10\]"),
    ("nvfp4", 0, instead(GLOBAL, torch.zeros(1)), f"{GLOBAL} is 0.0; a global scale is finite and not 0"),
    ("nvfp4", 0, instead(GLOBAL, torch.tensor([float("inf")])), f"{GLOBAL} is inf; a global scale is"),
    ("nvfp4", 0, instead(GLOBAL, torch.ones(2)), r"is F32 \[2\]; it must be F32 \[\] or \[1\]"),
    ("fp8", 0, without(SCALE), f"{MATRIX} has FP8 codes, but {SCALE} is missing; download it again"),
    ("fp8", 0, without(MATRIX), f"{SCALE} is a scale, but its weight is no matrix of codes"),
    (
        "fp8",
        0,
        instead(SCALE, torch.ones(70, 2)),
        r"is F32 \[70, 2\]; it must be BF16 or F16 or F32 \[70, 1\]",
    ),
    ("fp8", 0, instead(SCALE, torch.full((70, 1), float("nan"))), "holds a scale that is not finite"),
    ("fp8", 0, instead(MATRIX, E4M3[0]), r"has shape \[10\]; FP8 weights are matrices"),
    ("fp8", 0, instead("a.bias", BYTES), "a.bias is stored as U8, but belongs to no NVFP4 matrix"),
]


@pytest.mark.parametrize("form, layout, change, words", BROKEN)
def test_inconsistent_tensors_are_refused(tmp_path, form, layout, change, words):
    written(tmp_path, LAYOUTS[layout], form)
    changed(tmp_path, change)
    with pytest.raises(ModelError, match=words):
        entries(tmp_path)


@pytest.mark.parametrize("form, name", [("nvfp4", SCALE), ("fp8", MATRIX)])
def test_a_nan_is_refused_with_its_tensor(tmp_path, form, name):
    written(tmp_path, "compressed-tensors", form)
    changed(tmp_path, spoilt(name))
    with (
        open_reader(entries(tmp_path), CPU, torch.bfloat16) as weights,
        pytest.raises(ModelError, match=f"tensor {name} holds a (NaN|scale that is not a number); download"),
    ):
        held = weights.held(MATRIX)
        list(held.chunks)


def group(**fields):
    def change(how):
        how["config_groups"]["group_0"]["weights"].update(fields)

    return change


@pytest.mark.parametrize(
    "form, change, words",
    [
        (
            "fp8",
            group(type="int"),
            "has type 'int', num_bits 8 and strategy 'channel', which is not supported",
        ),
        ("fp8", group(strategy="group"), "num_bits 8 and strategy 'group', which is not supported"),
        ("fp8", group(strategy="block"), "block_structure"),
        ("fp8", group(symmetric=False), "symmetric is false, which is not supported for float codes"),
        ("nvfp4", group(group_size=32), "group_size 32 is not supported, only 16"),
        ("nvfp4", group(num_bits=8), "num_bits 8 and strategy 'tensor_group', which is not supported"),
        ("fp8", lambda how: how.update(format="int-quantized"), "format 'int-quantized' is not supported"),
        ("fp8", lambda how: how.pop("config_groups"), "config_groups is missing"),
        ("fp8", lambda how: how.update(quant_method="modelopt"), "quant_algo 'NONE' is not supported"),
    ],
)
def test_unsupported_quantisation_is_refused_by_name(tmp_path, form, change, words):
    written(tmp_path, "compressed-tensors", form)
    configured(tmp_path, change)
    with pytest.raises(ModelError, match=words):
        entries(tmp_path)
