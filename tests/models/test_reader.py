"""Tests reading weights from mapped files: in chunks, joined, sharded for ranks, cast, and prefetched."""

import json
import os
import threading

import pytest
import torch
from safetensors.torch import save_file

from mmengine.checkpoint.tensors import open_tensors
from mmengine.errors import ModelError
from mmengine.models import read_ahead, reader
from mmengine.models.progress import weights_reported_to
from mmengine.models.reader import Part, open_reader
from mmengine.native import library as native
from mmengine.native.linear import PackedLinear

CPU = torch.device("cpu")
DTYPES = (torch.float32, torch.bfloat16)


def drawn(*shape, dtype=torch.bfloat16, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.fixture
def stored(tmp_path):
    """Return a function that writes tensors to a file and returns their entries."""

    def write(tensors):
        save_file(tensors, tmp_path / "model.safetensors")
        return open_tensors(tmp_path, lambda name: name)

    return write


@pytest.fixture
def small_pieces(monkeypatch):
    monkeypatch.setattr(reader, "PIECE_VALUES", 1000)


@pytest.mark.parametrize("dtype", DTYPES)
def test_reading_whole_and_in_pieces_gives_the_stored_values(stored, small_pieces, dtype):
    wanted = {"a": drawn(70, 96), "b": drawn(50, 96, seed=1, dtype=torch.float32), "bias": drawn(7)}
    with open_reader(stored(wanted), CPU, dtype) as weights:
        joined = torch.cat((wanted["a"].to(dtype), wanted["b"].to(dtype)))
        assert torch.equal(weights.read("a", "b"), joined)
        assert torch.equal(weights.read("bias"), wanted["bias"].to(dtype))
        lent = weights.pieces("a", "b")
        assert (lent.n, lent.k, lent.dtype) == (120, 96, dtype)
        places = []
        for place, rows in lent.chunks:
            places.append(place)
            assert torch.equal(rows, joined[place : place + len(rows)])
        assert places == [*range(0, 70, 10), *range(70, 120, 10)]


@pytest.mark.parametrize("shard_is_there", (True, False))
def test_a_single_file_comes_before_a_stale_index(stored, tmp_path, shard_is_there):
    """The reader uses model.safetensors even if an older, sharded save has left an index."""
    index = {"weight_map": {"a": "model-00001-of-00001.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    if shard_is_there:
        save_file({"a": drawn(4, 8, seed=1)}, tmp_path / "model-00001-of-00001.safetensors")
    with open_reader(stored({"a": drawn(4, 8)}), CPU, torch.bfloat16) as weights:
        assert torch.equal(weights.read("a"), drawn(4, 8))


def test_pieces_of_a_stored_dtype_are_no_copies(stored):
    with open_reader(stored({"a": drawn(40, 96)}), CPU, torch.bfloat16) as weights:
        (memory,) = (file.memory for file in weights._files.values())
        begin = torch.frombuffer(memory, dtype=torch.uint8).data_ptr()
        ((_, rows),) = weights.pieces("a").chunks
        assert begin < rows.data_ptr() < begin + len(memory)


@pytest.mark.parametrize("axis", (0, 1))
def test_ranks_read_their_parts_in_pieces(stored, small_pieces, axis):
    whole = drawn(64, 96)
    entries, parts = stored({"a": whole}), []
    for rank in range(2):
        with open_reader(entries, CPU, torch.bfloat16, Part(rank, 2, {"a": axis}.get)) as weights:
            parts.append(weights.read("a"))
            assert torch.equal(torch.cat([rows for _, rows in weights.pieces("a").chunks]), parts[-1])
    assert torch.equal(torch.cat(parts, axis), whole)


def test_equal_tensors_are_found_whatever_they_are_stored_as(stored, small_pieces):
    a = drawn(40, 96)
    other = a.clone()
    other[39, 95] += 1
    tensors = {"a": a, "same": a.float(), "other": other, "narrow": drawn(40, 95)}
    with open_reader(stored(tensors), CPU, torch.bfloat16) as weights:
        assert weights.same("a", "same")
        assert not weights.same("a", "other") and not weights.same("a", "narrow")


def test_a_tensor_at_an_odd_place_is_read(tmp_path):
    values = drawn(3, 5)
    header = {"a": {"dtype": "BF16", "shape": [3, 5], "data_offsets": [1, 31]}}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    data = values.view(torch.uint8).numpy().tobytes()
    (tmp_path / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + b"x" + data)
    with open_reader(open_tensors(tmp_path, lambda name: name), CPU, torch.bfloat16) as weights:
        assert torch.equal(weights.read("a"), values)


def test_a_scalar_is_read_as_one_value(stored):
    with open_reader(stored({"a": torch.tensor(0.5)}), CPU, torch.float32) as weights:
        assert weights.read("a").tolist() == [0.5]


def test_a_file_that_was_cut_short_meanwhile_is_refused(stored):
    entries = stored({"a": drawn(64, 96)})
    path = entries["a"].path
    os.truncate(path, path.stat().st_size - 1)
    with (
        pytest.raises(ModelError, match="is cut short"),
        open_reader(entries, CPU, DTYPES[0]),
    ):
        pass


@pytest.mark.skipif(native.load() is None, reason="needs the compiled kernels")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("gate_up", (False, True))
def test_packing_in_pieces_equals_packing_at_once(stored, monkeypatch, dtype, gate_up):
    tensors = {"a": drawn(75, 130), "b": drawn(75, 130, seed=1)}
    whole = torch.cat((tensors["a"], tensors["b"])).to(dtype)
    x = drawn(5, 130, dtype=dtype, seed=2)
    wanted = PackedLinear(native.load(), whole, gate_up=gate_up)
    for rows in (1, 7, 16, 33, 75):
        monkeypatch.setattr(reader, "PIECE_VALUES", rows * 130)
        with open_reader(stored(tensors), CPU, dtype) as weights:
            found = PackedLinear(native.load(), weights.pieces("a", "b"), gate_up=gate_up)
        assert (found._packed == wanted._packed).all()
        assert torch.equal(found(x), wanted(x))


def test_progress_comes_with_each_piece(stored, small_pieces):
    told = []
    with (
        weights_reported_to(lambda *some: told.append(some)),
        open_reader(stored({"a": drawn(40, 96), "b": drawn(8)}), CPU, torch.float32) as weights,
    ):
        weights.read("a")
        weights.read("b")
    assert told == [(rows * 192, 7696) for rows in (10, 20, 30, 40)] + [(7696, 7696)]


@pytest.mark.skipif(not hasattr(os, "posix_fadvise"), reason="needs Linux")
def test_files_are_asked_for_once_and_only_where_there_is_room(tmp_path, monkeypatch):
    # Files are read ahead if they fill at most half of the free memory. A missing file is skipped.
    monkeypatch.setattr(read_ahead, "LEAST_BYTES", 1000)
    monkeypatch.setattr(read_ahead, "_STEP", 4096)
    paths = [tmp_path / name for name in ("a", "b")]
    for path in paths:
        path.write_bytes(bytes(10_000))
    asked, done = [], threading.Event()

    def advise(file, start, length, what):
        asked.append((os.path.basename(os.readlink(f"/proc/self/fd/{file}")), start, length, what))
        if len(asked) == 6:
            done.set()

    monkeypatch.setattr(os, "posix_fadvise", advise)
    with read_ahead.reading_ahead(paths, 40_000 - 1):
        pass
    assert not asked, "the files are larger than half the free memory"
    with read_ahead.reading_ahead([*paths, tmp_path / "gone"], 40_000):
        assert done.wait(10)
    places = [(name, start) for name in "ab" for start in (0, 4096, 8192)]
    assert asked == [(*place, 4096, os.POSIX_FADV_WILLNEED) for place in places]
