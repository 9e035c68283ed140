"""Tests 4-bit folders: dequantised values in each layout, refused folders, and answers."""

import json
import re
from contextlib import nullcontext

import pytest
import torch
from safetensors.torch import load_file, save_file

from mmengine import Engine
from mmengine.checkpoint.fingerprint import fingerprint
from mmengine.checkpoint.model_files import model_tensors
from mmengine.checkpoint.names import TensorNames
from mmengine.errors import ModelError
from mmengine.models.reader import Part, holds_codes, open_reader
from mmengine.models.weights import expected_tensors, open_weights
from mmengine.native import library
from mmengine.native.linear import ChunkedCodes, PackedLinear
from mmengine.testing.contract import PluginContract
from mmengine_llama import plugin
from tests.llama.tiny import make_tiny
from tests.models.int4_folder import LAYOUTS, to_int4

CPU = torch.device("cpu")
WEIGHT = "a.q_proj.weight"
needs_kernels = pytest.mark.skipif(library.load() is None, reason="needs the compiled kernels")


class TestInt4Llama(PluginContract):
    """The plugin contract with an AWQ folder, which stores zero points."""

    plugin = plugin
    refused = {"quantization_config.bits": 8, "quantization_config.group_size": 16}

    def make_checkpoint(self, folder):
        model = make_tiny(folder, hidden_size=64, intermediate_size=96)
        model.load_state_dict(to_int4(folder, "awq", 32), strict=False)
        return model

    def reduced(self, made):
        """Return transformers' bfloat16 model of the dequantised weights. transformers needs another package
        to read AWQ folders.
        """
        folder = made.folder.parent / "plain"
        made.reference.save_pretrained(folder)
        return made.reference.from_pretrained(folder, dtype=torch.bfloat16)


def drawn(*shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))


def entries(folder):
    return model_tensors(folder, lambda name: name)


@pytest.fixture
def plain(tmp_path):
    save_file({WEIGHT: drawn(40, 128), "norm.weight": drawn(50)}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text("{}")
    return tmp_path


# The codes of a matrix [8, 32] with a single group, for files written by hand from the formats' descriptions.
# All zero points are 3, and all scales are 0.5.
HAND = torch.tensor([[(r + c) % 16 for c in range(32)] for r in range(8)])


def signed(word):
    return word - 2**32 if word >= 2**31 else word


def by_hand(layout):
    """Return HAND's tensors in a layout. Each hexadecimal digit in a 32-bit word is a code. A word's last
    digit is the first code.
    """
    if layout == "awq":
        # A word has the codes of eight weight rows, in the order 0, 2, 4, 6, 1, 3, 5, 7.
        rows = [[(r + c) % 16 for r in (7, 5, 3, 1, 6, 4, 2, 0)] for c in range(32)]
        codes = [[signed(int("".join(f"{x:x}" for x in row), 16))] for row in rows]
        return {"qweight": codes, "qzeros": [[0x33333333]], "scales": 0.5 * torch.ones(1, 8).half()}
    if layout == "gptq":  # A word has eight codes along k. GPTQ stores each zero point minus 1.
        codes = [
            [
                signed(int("".join(f"{(r + c) % 16:x}" for c in range(8 * w + 7, 8 * w - 1, -1)), 16))
                for r in range(8)
            ]
            for w in range(4)
        ]
        return {"qweight": codes, "qzeros": [[0x22222222]], "scales": 0.5 * torch.ones(1, 8).half()}
    codes = [
        [
            signed(int("".join(f"{(r + c) % 16:x}" for c in range(8 * w + 7, 8 * w - 1, -1)), 16))
            for w in range(4)
        ]
        for r in range(8)
    ]
    return {
        "weight_packed": codes,
        "weight_zero_point": [[0x33333333]],
        "weight_scale": 0.5 * torch.ones(8, 1),
        "weight_shape": torch.tensor([8, 32]),
    }


@pytest.mark.parametrize("layout", ("compressed-tensors", "gptq", "awq"))
def test_codes_written_by_hand(tmp_path, layout):
    tensors = {
        f"a.{name}": torch.tensor(each, dtype=torch.int32) if isinstance(each, list) else each
        for name, each in by_hand(layout).items()
    }
    save_file(tensors, tmp_path / "model.safetensors")
    how = LAYOUTS[layout][1](32)
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": how}))
    with open_reader(entries(tmp_path), CPU, torch.float32) as weights:
        assert torch.equal(weights.read("a.weight"), (HAND - 3) * 0.5)


@pytest.mark.parametrize("group", (32, 64, 128))
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_weight_is_code_less_zero_times_scale(plain, layout, group):
    wanted = to_int4(plain, layout, group)[WEIGHT]
    with open_reader(entries(plain), CPU, torch.float32) as weights:
        found = weights.read(WEIGHT)
    assert torch.allclose(found, wanted, rtol=0, atol=1e-6) and len(found.unique()) > 100
    for axis, half in ((0, wanted[20:]), (1, wanted[:, 64:])):
        with open_reader(
            entries(plain), CPU, torch.float32, Part(1, 2, lambda name, axis=axis: axis)
        ) as weights:
            assert torch.allclose(weights.read(WEIGHT), half, rtol=0, atol=1e-6)


@pytest.mark.parametrize("symmetric", (True, False))
@pytest.mark.parametrize("group", (32, 128))
def test_compressed_tensors_own_packing_is_read(plain, group, symmetric):
    packed = pytest.importorskip("compressed_tensors.compressors.pack_quantized")
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme

    packer = packed.PackedQuantizationCompressor
    layout = "compressed-tensors, symmetric" if symmetric else "compressed-tensors"
    to_int4(plain, layout, group)  # Only the new config.json is used.
    random, (n, k) = torch.Generator().manual_seed(group), (40, 128)
    zeros = torch.randint(-8, 8, (n, k // group), generator=random).to(torch.int8)
    module = {
        "weight": torch.randn(n, k, generator=random),
        "weight_scale": (torch.rand(n, k // group, generator=random) + 0.1).half().float(),
        "weight_zero_point": torch.zeros_like(zeros) if symmetric else zeros,
    }
    how = QuantizationArgs(num_bits=4, type="int", strategy="group", group_size=group, symmetric=symmetric)
    scheme = QuantizationScheme(targets=["Linear"], weights=how)
    written = packer.compress(module, scheme)
    assert ("weight_zero_point" in written) != symmetric
    save_file(
        {f"{WEIGHT.removesuffix('weight')}{name}": value for name, value in written.items()},
        plain / "model.safetensors",
    )
    with open_reader(entries(plain), CPU, torch.float32) as weights:
        found = weights.read(WEIGHT)
    assert torch.equal(found, packer.decompress(written, scheme)["weight"])
    assert len(found.unique()) > 100


def ordered(folder, order):
    """Make `folder` a compressed-tensors folder with `order` as `actorder` in config.json. Returns the
    matrix's dequantised values.
    """
    meant = to_int4(folder, "compressed-tensors", 32)[WEIGHT]
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"]["config_groups"]["group_0"]["weights"]["actorder"] = order
    (folder / "config.json").write_text(json.dumps(config))
    return meant


@pytest.mark.parametrize("order", (None, False, "weight", "static"))
def test_an_order_of_calibration_leaves_the_format_as_it_is(plain, order):
    """With these values of `actorder`, the columns are stored in their usual order. A `g_idx` tensor must
    contain the usual order too.
    """
    wanted = ordered(plain, order)
    with open_reader(entries(plain), CPU, torch.float32) as weights:
        assert torch.allclose(weights.read(WEIGHT), wanted, rtol=0, atol=1e-6)
    tensors = load_file(plain / "model.safetensors")
    for step, said in ((32, None), (64, "g_idx orders values by act")):
        tensors["a.q_proj.weight_g_idx"] = (torch.arange(128) // step).int()
        save_file(tensors, plain / "model.safetensors")
        with pytest.raises(ModelError, match=said) if said else nullcontext():
            entries(plain)


@pytest.mark.parametrize("order", ("group", "dynamic", True, 0, ["weight"]))
def test_an_order_that_moves_columns_to_other_groups_is_refused_by_name(plain, order):
    ordered(plain, order)
    with pytest.raises(ModelError, match=re.escape(f"weights.actorder {order!r} is not supported")):
        entries(plain)


@needs_kernels
@pytest.mark.parametrize("layout", LAYOUTS)
def test_held_codes_equal_their_values(plain, layout):
    wanted = to_int4(plain, layout, 32)[WEIGHT]
    with open_reader(entries(plain), CPU, torch.bfloat16) as weights:
        held = weights.held(WEIGHT)
        assert isinstance(held, ChunkedCodes) and held.mins == ("symmetric" not in layout)
        packed = PackedLinear(library.load(), held)
        assert weights.how_held() == "int4"
    found = packed.rows(torch.arange(len(wanted)))
    assert torch.allclose(found.float(), wanted, rtol=2**-8, atol=1e-6)


@needs_kernels
def test_scales_that_float16_lacks_are_dequantised(plain):
    to_int4(plain, "compressed-tensors, symmetric", 32)
    tensors = load_file(plain / "model.safetensors")
    tensors[f"{WEIGHT}_scale"] = tensors[f"{WEIGHT}_scale"].float() * (1 + 2**-12)
    save_file(tensors, plain / "model.safetensors")
    with open_reader(entries(plain), CPU, torch.bfloat16) as weights:
        assert not isinstance(weights.held(WEIGHT), ChunkedCodes)


def test_scales_and_zeros_are_part_of_the_fingerprint(plain):
    to_int4(plain, "gptq", 32)
    tensors, found = load_file(plain / "model.safetensors"), set()
    for name in ("", "a.q_proj.qweight", "a.q_proj.qzeros", "a.q_proj.scales"):
        changed = {each: value.clone() for each, value in tensors.items()}
        if name:
            changed[name].view(torch.uint8)[0, 0] ^= 1
        save_file(changed, plain / "model.safetensors")
        found.add(fingerprint(plain, TensorNames(())))
    assert len(found) == 4


def without(name):
    return lambda tensors: tensors.pop(f"a.q_proj.{name}")


def instead(name, value):
    return lambda tensors: tensors.update({f"a.q_proj.{name}": value})


def number(*shape):
    return torch.zeros(shape, dtype=torch.int32)


@pytest.mark.parametrize(
    "layout, change, said",
    [
        (
            "gptq",
            without("scales"),
            "tensor a.q_proj.qweight has 4-bit codes, but a.q_proj.scales is missing; download it again",
        ),
        ("gptq", without("qzeros"), "but a.q_proj.qzeros is missing"),
        ("gptq", without("qweight"), "is stored as I32, but belongs to no supported"),
        ("gptq", instead("qweight", number(16, 39)), "which does not fit 39 rows and 128 columns"),
        ("gptq", instead("qweight", torch.zeros(16, 40)), r"qweight is F32 \[16, 40\]; codes must be I32"),
        (
            "gptq",
            instead("qzeros", number(4, 4)),
            r"qzeros is I32 \[4, 4\]; for 40 rows and 128 .* I32 \[4, 5\]",
        ),
        ("gptq", instead("scales", torch.ones(4, 39).half()), r"scales is F16 \[4, 39\]"),
        (
            "gptq",
            instead("scales", torch.full((4, 40), float("nan")).half()),
            "scale that is not finite",
        ),
        ("gptq", instead("g_idx", torch.arange(128).int() % 4), "g_idx orders values by act"),
        ("gptq", instead("g_idx", number(7)), r"g_idx is I32 \[7\], not I32 \[128\]"),
        ("awq", instead("qweight", number(127, 5)), "which does not fit 40 rows and 127 columns"),
        ("compressed-tensors", without("weight_scale"), "a.q_proj.weight_scale is missing"),
        ("compressed-tensors", without("weight_zero_point"), "a.q_proj.weight_zero_point is missing"),
        ("compressed-tensors", instead("weight_shape", torch.tensor([40, 2**40])), "fit 40 rows and 109"),
        ("compressed-tensors", instead("weight_shape", torch.tensor([-40, 128])), "fit -40 rows"),
        (
            "compressed-tensors",
            instead("weight_shape", torch.ones(2)),
            r"F32 \[2\]; a matrix shape must be I64 \[2\]",
        ),
    ],
)
def test_inconsistent_tensors_are_refused(plain, layout, change, said):
    to_int4(plain, layout, 32)
    tensors = load_file(plain / "model.safetensors")
    change(tensors)
    save_file(tensors, plain / "model.safetensors")
    with pytest.raises(ModelError, match=said):
        entries(plain)


@pytest.mark.parametrize(
    "layout, change, said",
    [
        ("gptq", {"desc_act": True}, "desc_act True is not supported, only False; fp8 .* are supported"),
        ("gptq", {"bits": 3}, "bits 3 is not supported, only 4"),
        ("gptq", {"group_size": -1}, "group_size -1 is not supported; use 32, 64, 128"),
        ("gptq", {"checkpoint_format": "marlin"}, "checkpoint_format 'marlin' is not supported"),
        ("gptq", {"format": "marlin"}, "format 'marlin' is not supported, only 'gptq' and 'gptq_v2'"),
        ("gptq", {"checkpoint_format": 2, "format": "gptq"}, "checkpoint_format 2 is not supported"),
        ("awq", {"version": "gemv"}, "version 'gemv' is not supported, only 'gemm'"),
        ("awq", {"version": None, "format": "GEMV"}, "format 'GEMV' is not supported, only 'gemm'"),
        ("compressed-tensors", {"format": "int-quantized"}, "format 'int-quantized' is not supported"),
        ("compressed-tensors", {"config_groups": {}}, "config_groups has 0 groups"),
        ("awq", {"quant_method": "bitsandbytes"}, "'bitsandbytes' is not supported; fp8 with"),
    ],
)
def test_unsupported_quantisation_is_refused_by_name(plain, layout, change, said):
    to_int4(plain, layout, 32)
    config = json.loads((plain / "config.json").read_text())
    config["quantization_config"] |= change
    (plain / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match=said):
        entries(plain)


def test_biases_of_zeros_that_gptq_stores_for_every_matrix_are_left_out(tmp_path):
    make_tiny(tmp_path, hidden_size=64, intermediate_size=32, num_hidden_layers=1)
    to_int4(tmp_path, "gptq", 32)
    path = tmp_path / "model.safetensors"
    tensors, last = load_file(path), "model.layers.0.mlp.up_proj.bias"
    for name in [name for name in tensors if name.endswith(".qweight")]:
        rows = tensors[f"{name.removesuffix('qweight')}scales"].shape[1]
        tensors[f"{name.removesuffix('qweight')}bias"] = -torch.zeros(rows).half()

    def biases():
        """Write the tensors, and return the biases that the model is loaded with."""
        save_file(tensors, path, {"format": "pt"})
        config = plugin.read_config(tmp_path)
        with open_weights(tmp_path, plugin.names, config, CPU, torch.float32) as weights:
            return {name: weights.read(name) for name in expected_tensors(config) if name.endswith(".bias")}

    assert biases() == {}
    for value in (6e-8, float("nan")):
        tensors[last][-1] = value
        with pytest.raises(ModelError, match=r"up_proj\.bias does not belong to the model that config.json"):
            biases()
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"attention_bias": True, "mlp_bias": True}))
    assert len(biases()) == 7  # With biases in the config, zero biases are loaded too.


@pytest.mark.parametrize(
    "layout, said",
    [
        ("gptq", {}),
        ("gptq", {"format": "GPTQ"}),
        ("gptq", {"checkpoint_format": "gptq", "format": "gptq_v2"}),
        ("gptq_v2", {"checkpoint_format": None, "format": "gptq_v2"}),
        ("gptq_v2", {"checkpoint_format": "GPTQ_v2", "format": "gptq"}),
        ("awq", {"version": "GEMM"}),
        ("awq", {"version": None, "format": "gemm"}),
    ],
)
def test_formats_equal_transformers(plain, layout, said):
    wanted = to_int4(plain, layout, 32)[WEIGHT]
    config = json.loads((plain / "config.json").read_text())
    config["quantization_config"] |= said
    (plain / "config.json").write_text(json.dumps(config))
    with open_reader(entries(plain), CPU, torch.float32) as weights:
        assert torch.allclose(weights.read(WEIGHT), wanted, rtol=0, atol=1e-6)


@pytest.mark.parametrize("layout", ("compressed-tensors, symmetric", "gptq", "awq"))
def test_answers_equal_the_plain_folders(tmp_path, layout):
    """In float32, all tokens are equal. In bfloat16 only the first tokens are compared, because the kernels
    multiply codes without rounding the weights to bfloat16.
    """
    for name in ("int4", "plain"):
        (tmp_path / name).mkdir()
        make_tiny(tmp_path / name, hidden_size=64, intermediate_size=96)
    meant = to_int4(tmp_path / "int4", layout, 32)
    save_file(
        {name: value.contiguous() for name, value in meant.items()}, tmp_path / "plain/model.safetensors"
    )
    for dtype, num_tokens in (("float32", 12), ("bfloat16", 1)):
        said = []
        for name in ("int4", "plain"):
            with Engine(tmp_path / name, device="cpu", dtype=dtype) as engine:
                said.append(
                    [each.token_ids for each in engine.generate(["a b", "b c d"], max_tokens=num_tokens)]
                )
                held = "int4" if holds_codes(CPU, getattr(torch, dtype)) else f"int4 held as {dtype}"
                assert engine.built.spec.weights_held == (held if name == "int4" else "")
        assert said[0] == said[1] and all(said[0])
