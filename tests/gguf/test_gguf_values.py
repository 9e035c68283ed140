"""Tests reading tensors from GGUF files: exact values, row order and memory use."""

import tracemalloc

import numpy as np
import pytest
import torch

from mmengine.checkpoint.gguf import tensors as tensors_module
from mmengine.checkpoint.gguf.container import open_container
from mmengine.checkpoint.gguf.model import GGUFModel
from mmengine.checkpoint.gguf.tensors import plain_name, tensor_entries
from mmengine.checkpoint.gguf.types import TYPES
from mmengine.errors import ModelError
from mmengine.models.reader import Part, open_reader
from tests.gguf.writing import BLOCKS, HALVES, Tensor, model, packed, tensor, vocabulary, weights, write

QUANTIZED = ("Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "IQ4_NL")  # Types whose codes stay in memory.


def decoded(kind: str, data: bytes) -> np.ndarray:
    number, _, size = BLOCKS[kind]
    return TYPES[number].decode(np.frombuffer(data, np.uint8).reshape(-1, size)).reshape(-1)


def half(value: float) -> bytes:
    return np.float16(value).tobytes()


def test_values_by_hand():
    assert decoded("F32", np.float32([1.5, -0.0]).tobytes()).tolist() == [1.5, -0.0]
    assert decoded("F16", half(-2.5)).tolist() == [-2.5]
    assert decoded("BF16", bytes([0x80, 0x3F, 0x20, 0xC1])).tolist() == [1.0, -10.0]
    nibbles = bytes(low | (15 - low) << 4 for low in range(16))
    assert decoded("Q4_0", half(0.5) + nibbles).tolist() == [
        *((low - 8) * 0.5 for low in range(16)),
        *((7 - low) * 0.5 for low in range(16)),
    ]
    assert decoded("Q4_1", half(0.25) + half(-3) + nibbles).tolist() == [
        *(low * 0.25 - 3 for low in range(16)),
        *((15 - low) * 0.25 - 3 for low in range(16)),
    ]
    steps = np.arange(-128, 128, 8, dtype=np.int8)
    assert decoded("Q8_0", half(0.125) + steps.tobytes()).tolist() == [
        step * 0.125 for step in range(-128, 128, 8)
    ]


def test_a_product_and_a_sum_are_each_rounded():
    scale, least, nibble = 0.1, 1000.3, 13
    found = decoded("Q4_1", half(scale) + half(least) + bytes([nibble] * 16))[0]
    product = np.float32(np.float16(scale)) * np.float32(nibble)
    assert found == product + np.float32(np.float16(least))


def q6_k_by_hand(block: bytes) -> list[np.float32]:
    """Return a decoded Q6_K block, one value at a time as in ggml's dequantize_row_q6_K."""
    scale, found = np.frombuffer(block[208:], "<f2")[0].astype(np.float32), [np.float32(0)] * 256
    for half in range(2):
        for l in range(32):  # noqa: E741
            low, high = block[64 * half :][:64], block[128 + 32 * half :][:32][l]
            codes = (low[l] & 15, low[l + 32] & 15, low[l] >> 4, low[l + 32] >> 4)
            for part, code in enumerate(codes):
                code = (code | (high >> 2 * part & 3) << 4) - 32
                times = np.int8(np.uint8(block[192 + 8 * half + 2 * part + l // 16]))
                found[128 * half + 32 * part + l] = scale * np.float32(times) * np.float32(code)
    return found


def test_q6_k_equals_ggml():
    data = packed("Q6_K", (32, 256), seed=4)
    wanted = [value for place in range(0, len(data), 210) for value in q6_k_by_hand(data[place:][:210])]
    found = decoded("Q6_K", data)
    assert (found.view(np.uint32) == np.array(wanted).view(np.uint32)).all() and len(np.unique(found)) > 5000


@pytest.mark.parametrize("kind", HALVES)
def test_blocks_equal_the_gguf_package_to_the_bit(kind):
    gguf = pytest.importorskip("gguf")
    number, _, size = BLOCKS[kind]
    blocks = np.random.default_rng(6).integers(0, 256, (2000, size), np.uint8)  # Scales may be NaN.
    with np.errstate(all="ignore"):
        found = TYPES[number].decode(blocks).reshape(-1)
        theirs = gguf.dequantize(blocks, gguf.GGMLQuantizationType(number)).reshape(-1)
    sound = np.isfinite(theirs)
    assert (np.isnan(found) == np.isnan(theirs)).all() and sound.mean() > 0.9
    assert (found.view(np.uint32)[sound] == theirs.view(np.uint32)[sound]).all()


# The root mean square rounding error of standard normal values, by type.
ROUNDING = {"F32": 0, "F16": 3e-4, "BF16": 2e-3, "Q8_0": 0.006, "Q6_K": 0.02, "Q5_0": 0.05, "Q5_1": 0.04}
ROUNDING |= {"Q5_K": 0.04, "Q4_0": 0.09, "Q4_1": 0.08, "Q4_K": 0.08, "IQ4_NL": 0.08, "IQ4_XS": 0.08}
ROUNDING |= {"MXFP4": 0.12, "Q3_K": 0.16, "Q2_K": 0.33}


@pytest.mark.parametrize("kind", BLOCKS)
def test_quantised_values_are_near_the_values(kind):
    """Tests tests/gguf/quantising.py, which the benchmark gguf_types also uses."""
    quantising = pytest.importorskip("tests.gguf.quantising")
    values = np.random.default_rng(0).standard_normal((8, 512)).astype(np.float32)
    values[3] = 0
    data = quantising.quantise(kind, values)
    assert len(data) == values.size // BLOCKS[kind][1] * BLOCKS[kind][2]
    error = decoded(kind, data).reshape(values.shape) - values
    assert not error[3].any()
    assert ROUNDING[kind] * 0.5 <= np.sqrt((np.delete(error, 3, 0) ** 2).mean()) <= ROUNDING[kind]


@pytest.mark.parametrize("kind", ("Q8_0", "Q4_0", "Q4_1", "Q6_K"))
def test_blocks_equal_transformers_to_the_bit(kind):
    dequant = pytest.importorskip("transformers.integrations.gguf.dequant")
    data = packed(kind, (4096, 32), seed=3)
    theirs = dequant.dequantize(torch.frombuffer(bytearray(data), dtype=torch.uint8), BLOCKS[kind][0])
    assert (decoded(kind, data).view(np.uint32) == theirs.numpy().view(np.uint32)).all()


@pytest.fixture
def opened(tmp_path):
    def put(tensors, heads=None, keys=()):
        path = tmp_path / "model.gguf"
        path.write_bytes(write(list(keys), tensors).data)
        paired = heads or {}
        return tensor_entries(open_container(path), lambda name: name, lambda name: paired.get(name, 0))

    return put


def whole(entry) -> np.ndarray:
    return np.concatenate([values for _, values in entry.pieces(0, entry.shape[0])])


def as_llama_cpp_stores(rows: np.ndarray, heads: int) -> np.ndarray:
    """Return rows in the order of llama.cpp's converter. In each head, the rows of the first and the second
    half alternate.
    """
    split = rows.reshape(heads, 2, len(rows) // heads // 2, *rows.shape[1:])
    return split.swapaxes(1, 2).reshape(rows.shape)


@pytest.mark.parametrize("shape", [(24, 6), (24,)])
def test_rows_in_pairs_are_reordered(opened, shape):
    rows = np.arange(np.prod(shape), dtype=np.float32).reshape(shape)
    stored = as_llama_cpp_stores(rows, 3)
    assert stored.tolist() != rows.tolist()
    entries = opened(
        [Tensor("q", "F32", shape, stored.tobytes()), Tensor("v", "F32", shape, rows.tobytes())], {"q": 3}
    )
    assert whole(entries["q"]).tolist() == rows.tolist() == whole(entries["v"]).tolist()


def test_a_vector_in_pairs_is_reordered(opened):
    data = packed("Q8_0", (64,), 1)
    entries = opened([Tensor("q", "Q8_0", (64,), data), Tensor("v", "Q8_0", (64,), data)], {"q": 2})
    plain = decoded("Q8_0", data)
    assert whole(entries["v"]).tolist() == plain.tolist()
    assert as_llama_cpp_stores(whole(entries["q"]), 2).tolist() == plain.tolist()
    ((place, part),) = entries["v"].pieces(8, 24)
    assert place == 0 and part.tolist() == plain[8:24].tolist()


@pytest.mark.parametrize("piece", [1, 64, 100, 2**20])
@pytest.mark.parametrize("kind", BLOCKS)
@pytest.mark.parametrize("heads", [0, 4])
def test_pieces_of_any_size_make_the_same_rows(opened, monkeypatch, kind, heads, piece):
    columns = max(64, BLOCKS[kind][1])
    (entry,) = opened([tensor("q", kind, (48, columns))], {"q": heads}).values()
    expected = whole(entry)
    monkeypatch.setattr(tensors_module, "PIECE_VALUES", piece)
    pieces = list(entry.pieces(5, 43))
    assert [place for place, _ in pieces] == list(range(0, 38, max(1, piece // columns)))
    assert (np.concatenate([values for _, values in pieces]) == expected[5:43]).all()
    assert all(values.flags.writeable for _, values in pieces)  # Otherwise torch warns.


@pytest.mark.parametrize("piece", [1, 100, 2**20])
@pytest.mark.parametrize("kind", QUANTIZED)
@pytest.mark.parametrize("heads", [0, 4])
def test_codes_decode_to_the_values(opened, monkeypatch, kind, heads, piece):
    (entry,) = opened([tensor("q", kind, (48, 64), seed=5)], {"q": heads}).values()
    expected = whole(entry)
    monkeypatch.setattr(tensors_module, "PIECE_VALUES", piece)
    pieces = list(entry.coded(5, 43))
    assert [place for place, _ in pieces] == list(range(0, 38, max(1, piece // 64)))
    parts = zip(*(each for _, each in pieces), strict=True)
    codes, scales, mins = (None if each[0] is None else np.concatenate(each) for each in parts)
    found = codes * scales.repeat(32, 1)
    assert (mins is not None) == (kind in ("Q4_1", "Q5_1")) == entry.coding.mins
    if mins is not None:
        found += mins.repeat(32, 1)
    assert codes.dtype == np.int8 and np.allclose(found, expected[5:43], rtol=1e-5, atol=1e-5)
    assert (scales == scales.astype(np.float16)).all()


@pytest.mark.parametrize(
    "kind, block, words",
    [
        ("Q8_0", half(1.0) + bytes([0x80] * 32), "tensor q holds -128, which is not a Q8_0 code"),
        ("Q8_0", half(float("nan")) + bytes(32), "tensor q holds a scale that is not finite"),
        (
            "Q4_1",
            half(1.0) + half(float("inf")) + bytes(16),
            "tensor q holds a scale that is not finite",
        ),
    ],
)
def test_codes_that_no_writer_produces_are_refused(opened, kind, block, words):
    (entry,) = opened([Tensor("q", kind, (1, 32), block)]).values()
    with pytest.raises(ModelError, match=words):
        list(entry.coded(0, 1))


def test_tensors_without_whole_blocks_have_no_codes(opened):
    kinds = {"v": "Q8_0", "f": "F16", "k": "Q6_K", "m": "Q4_0"}
    shapes = {"v": (64,), "k": (8, 256)}
    entries = opened([tensor(name, kind, shapes.get(name, (8, 64))) for name, kind in kinds.items()])
    assert [entries[name].coding is None for name in "vfkm"] == [True, True, True, False]


def test_stacked_experts_are_matrices_of_their_own(opened):
    stack = tensor("blk.0.ffn_gate_exps.weight", "Q4_0", (6, 3, 64))
    (entry,) = opened([Tensor("stack", stack.type, stack.shape, stack.data)]).values()
    values = whole(entry)  # Read before the fixture writes the next file.
    experts = opened([stack])
    assert list(experts) == [f"model.layers.0.mlp.experts.{index}.gate_proj.weight" for index in range(6)]
    assert all((whole(each) == one).all() for each, one in zip(experts.values(), values, strict=True))


def test_a_tensor_with_three_dimensions_is_cut_along_its_first(opened):
    (entry,) = opened([tensor("stack", "Q4_0", (6, 3, 64))]).values()
    ((_, part),) = entry.pieces(2, 4)
    assert part.shape == (2, 3, 64) and (part == whole(entry)[2:4]).all()


def test_heads_that_cannot_share_the_rows(opened):
    with pytest.raises(ModelError, match="tensor q has 24 rows, which cannot be divided by 5 heads"):
        opened([tensor("q", "F32", (24, 2))], {"q": 5})


def test_two_tensors_of_one_name(opened):
    with pytest.raises(ModelError, match="model.norm.weight and output_norm.weight are the same tensor"):
        opened([tensor("output_norm.weight", "F32", (2,)), tensor("model.norm.weight", "F32", (2,))])


def test_a_vocabulary_alone_has_no_tensors(opened):
    with pytest.raises(ModelError, match="holds no tensors, only a vocabulary"):
        opened([])


def test_a_file_that_is_cut_off_before_its_tensors_are_read(opened):
    (entry,) = opened([tensor("a", "Q8_0", (4, 32))]).values()
    entry.path.write_bytes(entry.path.read_bytes()[:-1])
    with pytest.raises(ModelError, match="tensor a is cut short"):
        whole(entry)
    entry.path.unlink()
    with pytest.raises(ModelError, match="cannot read .*: No such file"):
        whole(entry)


def test_names_equal_transformers():
    assert plain_name("blk.11.attn_q.bias") == "model.layers.11.self_attn.q_proj.bias"
    assert plain_name("output.weight") == "lm_head.weight"
    for name in ("blk.0.ffn_gate_inp_s.weight", "rope_freqs.weight", "output_extra", "blk.x.attn_q.weight"):
        assert plain_name(name) == name


@pytest.fixture
def small(tmp_path):
    path = tmp_path / "model.gguf"
    path.write_bytes(write(model() + vocabulary(), weights("Q4_1", head=True)).data)
    return GGUFModel(path).tensors(lambda name: name)


Q, K, V = (f"model.layers.1.self_attn.{name}_proj.weight" for name in "qkv")
DOWN = "model.layers.0.mlp.down_proj.weight"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_reader_joins_and_casts(small, dtype):
    with open_reader(small, torch.device("cpu"), dtype) as reader:
        joined = reader.read(Q, K, V)
        assert reader.same(Q, Q) and not reader.same(K, V)
    expected = np.concatenate([whole(small[name]) for name in (Q, K, V)])
    assert joined.dtype == dtype and joined.shape == (128, 64)
    assert torch.equal(joined, torch.from_numpy(expected).to(dtype))


@pytest.mark.parametrize(("name", "axis"), [(Q, 0), (DOWN, 1)])
def test_a_reader_cuts_for_ranks(small, name, axis):
    parts = []
    for rank in range(2):
        part = Part(rank, 2, {name: axis}.get)
        with open_reader(small, torch.device("cpu"), torch.float32, part) as reader:
            parts.append(reader.read(name))
    assert torch.equal(torch.cat(parts, axis), torch.from_numpy(whole(small[name])))


def test_llama_rows_are_reordered_and_qwen_rows_are_not(tmp_path):
    """Only llama's q and k rows are reordered."""
    found = {}
    for architecture in ("llama", "qwen3"):
        path = tmp_path / f"{architecture}.gguf"
        path.write_bytes(write(model(architecture) + vocabulary(), weights("F16")).data)
        found[architecture] = GGUFModel(path).tensors(lambda name: name)
    for name, entry in found["qwen3"].items():
        llama, qwen = whole(found["llama"][name]), whole(entry)
        heads = 4 if ".q_proj" in name else 2 if ".k_proj" in name else 0
        assert (qwen == (as_llama_cpp_stores(llama, heads) if heads else llama)).all(), name
        assert (llama != qwen).any() == bool(heads)


def test_a_large_tensor_is_read_in_little_memory(opened):
    """tracemalloc does not count the 64 MiB that torch allocates for the result."""
    (entry,) = opened([Tensor("q", "Q8_0", (4096, 4096), bytes(4096 * 4096 // 32 * 34))], {"q": 32}).values()
    with open_reader({"q": entry}, torch.device("cpu"), torch.float32) as reader:
        tracemalloc.start()
        reader.read("q")
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
    assert peak < 24 * 2**20, f"{peak / 2**20:.0f} MiB beside the model"
