"""Tests that GGUF headers are read correctly, and that numbers out of range are refused before memory is
allocated.
"""

import struct
import tracemalloc

import numpy as np
import pytest

from mmengine.checkpoint.gguf import container, source
from mmengine.checkpoint.gguf.container import open_container
from mmengine.errors import ModelError
from tests.gguf.writing import ARRAY, BOOL, FLOAT32, INT32, STRING, UINT32, UINT64, Tensor, tensor, write

ONE_OF_EACH = [
    (f"number.{kind}", kind, value)
    for kind, value in {
        0: 255, 1: -1, 2: 65535, 3: -2, 4: 2**32 - 1, 5: -3, 6: 0.5, 7: True, 10: 2**64 - 1, 11: -4, 12: 0.1
    }.items()
] + [("text", STRING, "zwölf Boxkämpfer 🥊"), ("nothing", STRING, "")]  # fmt: skip


@pytest.fixture
def opened(tmp_path):
    def put(*arguments, **options):
        path = tmp_path / "model.gguf"
        path.write_bytes(write(*arguments, **options).data)
        return open_container(path)

    return put


@pytest.mark.parametrize("version", [2, 3])
def test_values_of_every_type(opened, version):
    found = opened(ONE_OF_EACH, version=version).metadata
    assert found == {key: value for key, _, value in ONE_OF_EACH}
    assert [type(value) for value in found.values()] == [type(value) for _, _, value in ONE_OF_EACH]


def test_arrays_stay_in_the_file_until_asked_for(opened):
    keys = [("words", ARRAY, (STRING, ["a", "", "π"])), ("bytes", ARRAY, (1, [-1, 2])), ("after", UINT32, 7)]
    keys += [
        ("longs", ARRAY, (UINT64, [2**62])),
        ("floats", ARRAY, (FLOAT32, [0.5])),
        ("truths", ARRAY, (BOOL, [1])),
    ]
    found = opened(keys).metadata
    assert found["words"].as_strings() == ["a", "", "π"] and found["after"] == 7
    assert found["bytes"].as_integers().tolist() == [-1, 2] and found["longs"].as_integers().tolist() == [
        2**62
    ]
    assert repr(found["words"]) == "an array of 3"
    for key, what in (
        ("words", "integers"),
        ("floats", "integers"),
        ("truths", "integers"),
        ("bytes", "strings"),
    ):
        with pytest.raises(ModelError, match=f"{key} holds no {what}"):
            getattr(found[key], f"as_{what}")()


def test_an_array_that_was_cut_off_meanwhile(opened):
    found = opened([("words", ARRAY, (STRING, ["abc", "def"]))])
    found.path.write_bytes(found.path.read_bytes()[:-3])
    with pytest.raises(ModelError, match="is cut short"):
        found.metadata["words"].as_strings()
    found.path.unlink()
    with pytest.raises(ModelError, match="cannot read .*: No such file"):
        found.metadata["words"].as_strings()


@pytest.mark.parametrize("alignment", [1, 8, 32, 4096])
def test_tensors_have_their_written_places(opened, alignment):
    tensors = [
        tensor("a", "F32", (3,), 1),
        tensor("b", "Q4_0", (2, 3, 64), 2),
        tensor("c", "BF16", (5, 1), 3),
    ]
    found = opened([("general.alignment", UINT32, alignment)], tensors, alignment=alignment)
    data = found.path.read_bytes()
    assert list(found.tensors) == ["a", "b", "c"]
    for told in tensors:
        here = found.tensors[told.name]
        assert here.shape == told.shape and here.type.name == told.type and here.start % alignment == 0
        assert data[here.start : here.start + here.num_bytes] == told.data


def test_a_row_of_more_values_than_bytes(opened):
    (found,) = opened([], [tensor("a", "Q4_0", (1, 2**14))]).tensors.values()
    assert found.shape == (1, 2**14) and found.num_bytes == 2**14 // 32 * 18


def test_a_missing_file_is_reported(tmp_path):
    with pytest.raises(ModelError, match="cannot read .*: No such file"):
        open_container(tmp_path / "none.gguf")


SOUND = [tensor("a", "F32", (4, 8), 1), tensor("b", "Q8_0", (2, 32), 2)]


def changed(span: str, form: str, *values, keys=(("k", UINT32, 1),), tensors=SOUND) -> bytes:
    """Return a valid file whose header field `span` is overwritten with `values`."""
    out = write(list(keys), tensors)
    (start,) = [start for name, start, _ in out.spans if name == span]
    struct.pack_into(f"<{form}", out.data, start, *values)
    return bytes(out.data)


REFUSED = {
    "empty": (b"", "not GGUF, or is cut short"),
    "another format": (changed("magic", "4s", b"GGJT"), "not GGUF"),
    "version 1": (changed("version", "I", 1), "GGUF version is 1; supported are 2 and 3"),
    "version 4": (changed("version", "I", 4), "GGUF version is 4; supported are 2 and 3"),
    "big-endian": (changed("version", "I", 3 << 24), "version is 3 in big-endian order"),
    "many keys": (
        changed("number of keys", "Q", 2**63),
        "claims 9223372036854775808 keys; the limit is 65536",
    ),
    "keys without room": (changed("number of keys", "Q", 60_000), "claims 60000 keys, too many for"),
    "many tensors": (changed("number of tensors", "Q", 2**40), "1099511627776 tensors; the limit is 65536"),
    "tensors without room": (changed("number of tensors", "Q", 999), "999 tensors, too many for"),
    "a long key": (changed("length of key k", "Q", 2**60), "name of a key has 1152921504606846976 bytes"),
    "a key that is no text": (changed("key k", "B", 255), "name of a key is not UTF-8"),
    "a key of controls": (changed("key k", "B", 27), r"name of a key is '\\x1b', which cannot be printed"),
    "a key twice": (write([("k", UINT32, 1)] * 2).data, "the key k is stored twice"),
    "an unknown type": (changed("type of k", "I", 13), "k has a value of the unknown type 13"),
    "a long string": (
        changed("length of k", "Q", 2**40, keys=[("k", STRING, "v")]),
        "k has 1099511627776 bytes; the limit",
    ),
    "a string beyond the end": (
        changed("length of k", "Q", 5000, keys=[("k", STRING, "v")]),
        "cut short or dam",
    ),
    "a text that is none": (write([("k", STRING, b"\xff")]).data, "k is not UTF-8"),
    "arrays of arrays": (
        write([("k", ARRAY, (4, []))]).data.replace(
            struct.pack("<IIQ", 9, 4, 0), struct.pack("<IIQ", 9, 9, 1)
        ),
        "k is an array of arrays",
    ),
    "an array of nothing": (
        changed("entries' type of k", "I", 99, keys=[("k", ARRAY, (4, [1]))]),
        "array of the unknown type 99",
    ),
    "a long array": (
        changed("count of k", "Q", 2**61, keys=[("k", ARRAY, (4, [1]))]),
        "claims 23058430.* entries",
    ),
    "many strings": (
        changed("count of k", "Q", 60, keys=[("k", ARRAY, (STRING, ["v"]))]),
        "claims 60 entries",
    ),
    "a long word": (
        changed("length of k 0", "Q", 2**64 - 1, keys=[("k", ARRAY, (STRING, ["v"]))]),
        "cut short or damaged",
    ),
    "alignment 0": (
        write([("general.alignment", UINT32, 0)]).data,
        "general.alignment is 0; .* power of two",
    ),
    "alignment 24": (write([("general.alignment", UINT32, 24)]).data, "general.alignment is 24"),
    "a wild alignment": (
        write([("general.alignment", UINT32, 2**31)]).data,
        "general.alignment is 2147483648",
    ),
    "alignment in words": (write([("general.alignment", STRING, "32")]).data, "general.alignment is '32'"),
    "a long name": (
        changed("length of name of a", "Q", 301),
        "name of a tensor has 301 bytes; the limit is 300",
    ),
    "no dimension": (changed("dimensions of a", "I", 0), "a has 0 dimensions"),
    "5 dimensions": (changed("dimensions of a", "I", 5), "a has 5 dimensions"),
    "a type without a decoder": (
        changed("type of a", "I", 34),
        "a is stored as TQ1_0; choose a file with a supported type: F32, F16, BF16, Q8_0, Q4_0, Q4_1, Q5_0",
    ),
    "a row that is no whole block": (
        changed("type of a", "I", 12),
        r"tensor a of type Q4_K has shape .*, the last a multiple of 256",
    ),
    "an unknown kind": (changed("type of a", "I", 77), "a is stored as type 77, which is unknown here"),
    "an empty dimension": (
        write([], [Tensor("a", "F32", (4, 0), b"")]).data,
        r"a of type F32 has shape \[4, 0\]",
    ),
    "a wild dimension": (
        write([], [Tensor("a", "F32", (2**62, 4), bytes(16))]).data,
        "from 1 to the number that .* bytes hold",
    ),
    "half a block": (write([], [Tensor("a", "Q8_0", (2, 48), bytes(102))]).data, "the last a multiple of 32"),
    "half a large block": (
        write([], [Tensor("a", "Q6_K", (2, 128), bytes(210))]).data,
        "the last a multiple of 256",
    ),
    "too few large blocks": (write([], [Tensor("a", "Q6_K", (2, 256), bytes(419))]).data, "cut short"),
    "a tensor twice": (write([], [SOUND[0], SOUND[0]]).data, "tensor a is stored twice"),
    "an odd offset": (
        changed("offset of b", "Q", 129),
        "b begins at 129, not a multiple of the alignment 32",
    ),
    "overlapping": (changed("offset of b", "Q", 96), "tensors a and b overlap"),
    "the same place": (changed("offset of b", "Q", 0), "tensors [ab] and [ab] overlap"),
    "beyond the end": (changed("offset of b", "Q", 2**40), "tensor b ends at byte .* of"),
    "beyond all numbers": (changed("offset of b", "Q", 2**64 - 32), "tensor b ends at byte .* of"),
    "more rows than bytes": (
        write([], [Tensor("a", "F32", (40, 8), bytes(128))]).data,
        "cut short or damaged",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_errors_name_the_wrong_field(tmp_path, name):
    data, said = REFUSED[name]
    path = tmp_path / "model.gguf"
    path.write_bytes(data)
    with pytest.raises(ModelError, match=said) as caught:
        open_container(path)
    assert str(caught.value).startswith(f"{path}: ") and len(str(caught.value)) < 400


def test_the_valid_file_is_read(tmp_path):
    path = tmp_path / "model.gguf"
    path.write_bytes(changed("magic", "4s", b"GGUF"))
    assert list(open_container(path).tensors) == ["a", "b"]


def test_much_metadata_is_refused(opened, monkeypatch):
    monkeypatch.setattr(source, "MAX_METADATA_BYTES", 2000)
    assert opened([("k", STRING, "v" * 1900)])
    for value in ((STRING, "v" * 2100), (ARRAY, (0, [1] * 2100)), (ARRAY, (STRING, ["v" * 100] * 30))):
        with pytest.raises(ModelError, match="metadata before the weights exceeds 2000 bytes"):
            opened([("k", *value)])


def test_many_strings_are_refused_over_all_arrays(opened, monkeypatch):
    monkeypatch.setattr(source, "MAX_STRINGS", 100)
    assert opened([("k", ARRAY, (STRING, ["v"] * 60)), ("l", ARRAY, (STRING, ["v"] * 40))])
    with pytest.raises(ModelError, match="with l the file has 101 strings; the limit is 100"):
        opened([("k", ARRAY, (STRING, ["v"] * 60)), ("l", ARRAY, (STRING, ["v"] * 41))])


def test_a_header_full_of_strings_takes_little_memory(opened):
    """The reader seeks past the array's strings and does not store them."""
    count = 2**17
    out = write([("k", ARRAY, (STRING, []))])
    (place,) = [start for name, start, _ in out.spans if name == "count of k"]
    struct.pack_into("<Q", out.data, place, count)
    path = opened([]).path
    path.write_bytes(bytes(out.data) + bytes(8 * count))
    tracemalloc.start()
    found = open_container(path)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert found.metadata["k"].count == count and peak < 2**19


def test_the_tensor_count_is_limited(opened, monkeypatch):
    monkeypatch.setattr(container, "MAX_TENSORS", 20)
    names = [tensor(f"t{i}", "F16", (1,), i) for i in range(21)]
    assert len(opened([], names[:20]).tensors) == 20
    with pytest.raises(ModelError, match="21 tensors; the limit is 20"):
        opened([], names)


def test_integer_arrays_equal_numpys(opened):
    values = np.arange(-5, 5)
    assert (opened([("k", ARRAY, (INT32, values.tolist()))]).metadata["k"].as_integers() == values).all()
