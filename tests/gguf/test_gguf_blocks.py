"""Tests that the quantised GGUF blocks in memory have the same values as the decoded file."""

import numpy as np
import pytest
import torch

from mmengine.checkpoint.gguf import tensors as tensors_module
from mmengine.checkpoint.gguf.container import open_container
from mmengine.checkpoint.gguf.tensors import tensor_entries
from mmengine.checkpoint.gguf.types import BLOCKS
from mmengine.errors import ModelError
from mmengine.models.held_weights import holds_blocks
from mmengine.models.reader import open_reader
from mmengine.native import library
from mmengine.native.blocks import ChunkedBlocks
from mmengine.native.linear import ChunkedCodes, PackedLinear, RowForm, prefers_int16
from tests.gguf.writing import HALVES, Tensor, packed, tensor, write
from tests.instruction_sets import isas
from tests.instruction_sets import opened as opened_isa

CPU = torch.device("cpu")
KINDS = tuple(sorted(BLOCKS))
MIXED = ("Q4_K", "Q8_0", "Q8_0")


@pytest.fixture
def opened(tmp_path):
    def put(tensors, heads=None):
        path = tmp_path / "model.gguf"
        path.write_bytes(write([], tensors).data)
        paired = heads or {}
        return tensor_entries(open_container(path), lambda name: name, lambda name: paired.get(name, 0))

    return put


def whole(entry) -> torch.Tensor:
    return torch.from_numpy(np.concatenate([values for _, values in entry.pieces(0, entry.shape[0])]))


@pytest.mark.parametrize("piece", [1, 700, 2**20])
@pytest.mark.parametrize("heads", [0, 4])
def test_rows_of_blocks_are_read_in_pieces(opened, monkeypatch, heads, piece):
    (entry,) = opened([tensor("q", "Q4_K", (48, 256), 1)], {"q": heads}).values()
    stored = np.frombuffer(packed("Q4_K", (48, 256), 1), np.uint8).reshape(48, 144)
    if heads:
        stored = stored.reshape(4, 6, 2, 144).swapaxes(1, 2).reshape(48, 144)
    monkeypatch.setattr(tensors_module, "PIECE_VALUES", piece)
    pieces = list(entry.block_rows(5, 43))
    assert [at for at, _ in pieces] == list(range(0, 38, max(1, piece // 256)))
    assert (np.concatenate([rows for _, rows in pieces]) == stored[5:43]).all()


@pytest.mark.parametrize("kind", [kind for kind in KINDS if HALVES[kind]])
def test_a_scale_that_is_not_finite_is_refused(opened, kind):
    for at in HALVES[kind]:
        data = bytearray(packed(kind, (2, 256), 0))
        data[at : at + 2] = np.float16(np.inf).tobytes()
        (entry,) = opened([Tensor("q", kind, (2, 256), bytes(data))]).values()
        with pytest.raises(ModelError, match="tensor q holds a scale that is not finite"):
            list(entry.block_rows(0, 2))


def test_only_matrices_of_whole_blocks_have_block_rows(opened):
    entries = opened(
        [tensor("v", "Q4_K", (256,)), tensor("f", "F16", (2, 32)), tensor("m", "Q6_K", (2, 256))]
    )
    assert [entries[name].blocks is None for name in "vfm"] == [True, True, False]


def test_a_reader_joins_tensors_of_several_types(opened):
    if not holds_blocks(CPU, torch.float32):
        pytest.skip("these kernels multiply no blocks")
    entries = opened(
        [
            tensor("q", "Q4_K", (64, 256), 1),
            tensor("k", "Q6_K", (32, 256), 2),
            tensor("v", "F32", (8, 256), 3),
        ],
        {"q": 2},
    )
    with open_reader(entries, CPU, torch.float32) as reader:
        held = reader.held("q", "k")
        assert isinstance(held, ChunkedBlocks) and held.runs == ((0, 12), (2, 14))
        layer = PackedLinear(library.load(), held)
        assert not isinstance(reader.held("q", "k", alike=True), ChunkedBlocks)
        assert not isinstance(reader.held("k", "v"), ChunkedBlocks) and reader.keeps_blocks("k")
        # (q, k) in blocks, then (q, k) and (k, v) in float32. The 40 rows of (k, v) are padded to 64.
        size = 64 * 148 + 32 * 210 + (96 + 64) * 256 * 4
        said = f"Q4_K, Q6_K held as codes in {size / 1e6:,.1f} MB; Q4_K, Q6_K dequantised to float32"
        assert reader.how_held() == said
    weights = torch.cat([whole(entries["q"]), whole(entries["k"])])
    assert torch.equal(layer.rows(torch.arange(96)).view(torch.int32), weights.view(torch.int32))


def test_how_a_reader_holds_blocks_in_bfloat16(opened):
    """If the kernels multiply a type's codes faster than its blocks, the reader stores codes. A joined matrix
    with several types is stored as blocks.
    """
    entries = opened(
        [tensor(name, kind, (32, 256), at) for at, (name, kind) in enumerate(zip("qkv", MIXED, strict=True))]
    )
    with open_reader(entries, CPU, torch.bfloat16) as reader:
        joined, codes = reader.held("q", "k"), reader.held("v")
        found = torch.cat([whole(entries[name]) for name in "qk"]).bfloat16()
        if holds_blocks(CPU, torch.bfloat16):
            assert isinstance(joined, ChunkedBlocks) and joined.runs == ((0, 12), (1, 8))
            layer = PackedLinear(library.load(), joined)
            assert torch.equal(layer.rows(torch.arange(64)), found)
            int8 = "int8 with int16 activations" if prefers_int16(library.load()) else "int8"
            said = f"Q4_K, Q8_0 held as codes and other matrices as {int8} in "
            assert reader.how_held().startswith(said)
        else:
            assert not isinstance(joined, ChunkedBlocks)
        assert isinstance(codes, ChunkedCodes) == (library.load() is not None)


def test_a_q8_0_code_without_a_magnitude_in_seven_bits_is_refused(opened):
    if not holds_blocks(CPU, torch.bfloat16):
        pytest.skip("these kernels multiply no blocks in bfloat16")
    stored = bytearray(packed("Q8_0", (32, 256), 1))
    stored[-1] = 0x80
    entries = opened([tensor("q", "Q4_K", (32, 256)), Tensor("k", "Q8_0", (32, 256), bytes(stored))])
    for dtype in (torch.float32, torch.bfloat16):
        with open_reader(entries, CPU, dtype) as reader:
            held = reader.held("q", "k")
            if dtype == torch.float32:
                assert PackedLinear(library.load(), held).rows(torch.tensor([63]))[0, -1] != 0
                continue
            with pytest.raises(ModelError, match="tensor k holds -128, which is not a Q8_0 code"):
                PackedLinear(library.load(), held)


@pytest.mark.parametrize("isa", isas())
def test_q8_0_is_multiplied_by_int16_where_the_kernels_prefer_it(opened, monkeypatch, isa):
    """If `activations` is "model" and the kernels prefer int16, the inputs of Q8_0 matrices are quantised to
    int16. Inputs of other matrices are not.
    """
    is_preferred = prefers_int16(opened_isa(isa))
    entries = opened([tensor("q", "Q8_0", (64, 256)), tensor("k", "IQ4_NL", (64, 256), 1)])
    monkeypatch.setenv("MMENGINE_NATIVE_ISA", isa)
    library.forget()
    try:
        for activations in ("model", "int8"):
            with open_reader(entries, CPU, torch.bfloat16, activations=activations) as reader:
                held, other = reader.held("q"), reader.held("k")
                if activations == "int8":
                    assert held.row_form is other.row_form is RowForm.INT8
                elif is_preferred:
                    assert held.row_form is RowForm.INT16 and not hasattr(other, "row_form")
                    assert "int8 with int16 activations" in reader.how_held()
                    x = torch.randn(5, 256, generator=torch.Generator().manual_seed(0)).bfloat16()
                    wanted = x.double() @ whole(entries["q"]).double().T
                    found = PackedLinear(library.load(), held)(x)
                    assert torch.allclose(found.double(), wanted, rtol=2**-7, atol=1e-3)
                else:
                    assert getattr(held, "row_form", RowForm.FLOAT) is RowForm.FLOAT
                    assert "int16" not in reader.how_held()
    finally:
        library.forget()
