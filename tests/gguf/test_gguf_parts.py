"""Tests models in several GGUF files, and the rules for file names."""

import pytest

from mmengine.checkpoint.fingerprint import fingerprint
from mmengine.checkpoint.gguf.file_names import find_model, find_projector, num_bits, part_name, parts_of
from mmengine.checkpoint.gguf.model import GGUFModel
from mmengine.checkpoint.model_files import model_weight_files
from mmengine.errors import ModelError
from mmengine_llama import plugin
from tests.gguf.writing import UINT32, Tensor, model, tensor, vocabulary, weights, write

NAME = "small-Q4_1-0000{}-of-00003.gguf"


def split(number: int, count: int, tensors: int) -> list:
    """Return the metadata of a split file. `number`: the file's number, from 1."""
    return [
        ("split.no", UINT32, number - 1),
        ("split.count", UINT32, count),
        ("split.tensors.count", UINT32, tensors),
    ]


@pytest.fixture
def parts(tmp_path):
    """Write a small model as one file and as three files, and return the paths of the three files."""
    tensors, keys = weights(), model() + vocabulary()
    (tmp_path / "whole.gguf").write_bytes(write(keys, tensors).data)
    paths = [tmp_path / NAME.format(number) for number in (1, 2, 3)]
    shared = [[], tensors[:9], tensors[9:]]  # Some tools write only metadata to the first file.
    for number, (path, own) in enumerate(zip(paths, shared, strict=True), 1):
        first = keys if number == 1 else []
        path.write_bytes(write(first + split(number, 3, len(tensors)), own).data)
    return paths


def refused(path, said):
    with pytest.raises(ModelError, match=said) as error:
        GGUFModel(path)
    assert "\n" not in str(error.value) and len(str(error.value)) < 400


def test_parts_are_one_model(parts, tmp_path):
    whole, first = GGUFModel(tmp_path / "whole.gguf"), GGUFModel(parts[0])
    assert first.file("config.json") == whole.file("config.json")
    assert first.file("tokenizer.json") == whole.file("tokenizer.json")
    both = [each.tensors(plugin.names.canonical) for each in (first, whole)]
    assert both[0].keys() == both[1].keys()
    for name, entry in both[0].items():
        other = both[1][name]
        mine, theirs = (list(each.pieces(0, each.shape[0])) for each in (entry, other))
        assert all((x == y).all() for (_, x), (_, y) in zip(mine, theirs, strict=True))
    assert {entry.path for entry in both[0].values()} == set(parts[1:])
    assert model_weight_files(parts[0]) == parts
    assert fingerprint(parts[0], plugin.names) == fingerprint(tmp_path / "whole.gguf", plugin.names)


@pytest.mark.parametrize("place", [1, 2])
def test_a_missing_part_is_named(parts, place):
    parts[place].unlink()
    refused(parts[0], f"{parts[place].name} is missing: {parts[0].name} is part 1 of 3; download it")


@pytest.mark.parametrize("place", [0, 1, 2])
def test_a_truncated_part_is_named(parts, place):
    data = parts[place].read_bytes()
    for cut in (20, len(data) // 2, len(data) - 1):
        parts[place].write_bytes(data[:cut])
        refused(parts[0], parts[place].name)


def test_a_later_part_is_not_the_model(parts):
    refused(parts[1], f"it is part 2 of 3; give {parts[0].name}")
    refused(parts[2], f"it is part 3 of 3; give {parts[0].name}")


def test_parts_in_the_wrong_order_are_refused(parts):
    second = parts[1].read_bytes()
    parts[1].write_bytes(parts[2].read_bytes())
    parts[2].write_bytes(second)
    refused(parts[0], f"{parts[1].name}: it is part 3 of 3, not part 2 of 3 as its name says")


def test_parts_of_other_models_are_refused(parts):
    parts[2].write_bytes(write(split(3, 4, 9), weights()[9:]).data)
    refused(parts[0], f"{parts[2].name}: it is part 3 of 4, not part 3 of 3")
    parts[2].write_bytes(write([], weights()[9:]).data)
    refused(parts[0], f"{parts[2].name}: it is part 1 of 0, not part 3 of 3")
    parts[2].write_bytes(write(split(3, 3, 20), weights()[9:-1]).data)
    refused(
        parts[0], "its 3 parts have 19 tensors, but split.tensors.count is 20; one of them is from another"
    )
    parts[2].write_bytes(write(split(3, 3, 20), weights()[8:]).data)
    refused(parts[0], rf"{parts[2].name}: tensor {weights()[8].name} is in {parts[1].name} too")


def test_a_part_with_another_name_is_refused(parts, tmp_path):
    refused(
        parts[0].rename(tmp_path / "small.gguf"),
        "it is one of 3 parts, but its name does not end with -00001",
    )
    whole = (tmp_path / "whole.gguf").rename(tmp_path / NAME.format(1))
    refused(whole, "split.count is 1, but the name says 3 parts; download it again")
    refused(
        whole.rename(tmp_path / "x-00001-of-99999.gguf"), "split.count is 1, but the name says 99999 parts"
    )


def test_wild_counts_are_refused(parts):
    tensors: list[Tensor] = [tensor("a", "F32", (4,))]
    for count in (2**31, 1001):
        parts[0].write_bytes(write(model() + vocabulary() + split(1, count, 1), tensors).data)
        refused(parts[0], f"split.count is {count}; it must be an integer from 0 to 1000")


def test_names_say_bits_and_parts():
    assert [num_bits(f"model{each}.gguf") for each in ("-Q8_0", "-UD-Q2_K_XL", ".i1-Q6_K", "-BF16", "")] == [
        8, 2, 6, 16, 0,
    ]  # fmt: skip
    assert num_bits("model-MXFP4-00001-of-00002.gguf") == 4
    assert part_name("a-00002-of-00003.gguf") == ("a", 2, 3)
    assert part_name("a-2-of-3.gguf") == ("a-2-of-3", 1, 1)


LISTED = [
    "UD-Q4_K_XL/m-UD-Q4_K_XL-00002-of-00002.gguf",
    "UD-Q4_K_XL/m-UD-Q4_K_XL-00001-of-00002.gguf",
    "README.md",
    "imatrix_unsloth.gguf",
    "m-BF16.gguf",
    "m-Q4_K_M.gguf",
    "m-Q8_0.gguf",
    "mmproj-BF16.gguf",
    "mmproj-F32.gguf",
    "mmproj-Q8_0.gguf",
    "mtp-m-Q8_0.gguf",
]


@pytest.mark.parametrize(
    ("tag", "found"),
    [
        ("", "m-Q4_K_M.gguf"),
        ("Q8_0", "m-Q8_0.gguf"),
        ("q8_0", "m-Q8_0.gguf"),
        ("UD-Q4_K_XL", LISTED[1]),
        ("Q4_K_XL", LISTED[1]),
        ("BF16", "m-BF16.gguf"),
        ("Q4_K", None),
        ("Q2_K", None),
        (".", None),
    ],
)
def test_a_tag_picks_a_file(tag, found):
    assert find_model(LISTED, tag) == found


def test_without_a_tag_the_default_is_picked():
    assert find_model([path for path in LISTED if "Q4_K_M" not in path]) == "m-Q8_0.gguf"
    assert find_model(["m-Q2_K.gguf", "m-Q3_K.gguf"]) == "m-Q2_K.gguf"
    assert find_model(["mmproj-BF16.gguf", "README.md"]) is None


def test_a_split_model_brings_its_parts():
    assert parts_of(LISTED, LISTED[1]) == [LISTED[1], LISTED[0]]
    assert parts_of(LISTED, "m-Q8_0.gguf") == ["m-Q8_0.gguf"]


def test_the_projector_with_the_nearest_bits_is_picked():
    assert find_projector(LISTED, "m-Q4_K_M.gguf") == "mmproj-Q8_0.gguf"
    assert find_projector(LISTED, "m-BF16.gguf") == "mmproj-BF16.gguf"
    assert find_projector(LISTED, LISTED[1]) == "mmproj-Q8_0.gguf"  # The projector is in the parent folder.
    inside = [*LISTED, "UD-Q4_K_XL/mmproj-F32.gguf", "other/mmproj-Q4_0.gguf"]
    assert find_projector(inside, LISTED[1]) == "UD-Q4_K_XL/mmproj-F32.gguf"
    assert find_projector(inside, "m-Q4_K_M.gguf") == "mmproj-Q8_0.gguf"
    assert find_projector(["m.gguf"], "m.gguf") is None
