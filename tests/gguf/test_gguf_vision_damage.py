"""Tests damaged vision projectors and split models. The reader needs little memory, and either reads the
model or raises a one-line ModelError.
"""

import random

import pytest

from mmengine.checkpoint.gguf.model import GGUFModel
from mmengine.errors import ModelError
from mmengine_qwen3_vl.config import read_config
from tests.gguf.test_gguf_damage import WILD, measured, written_over
from tests.gguf.vision import text_keys, vision_keys
from tests.gguf.writing import UINT32, Tensor, packed, vocabulary, write
from tests.qwen3_vl.qwen3_vl_reference import TINY

FILES = ("config.json", "preprocessor_config.json", "video_preprocessor_config.json")
MEMORY = 4 * 2**20  # Limit in bytes for reading two files of 0.1 MB.
CONFIG = {
    "text_config": {**TINY["text"], "hidden_size": 48, "rms_norm_eps": 1e-6},
    "vision_config": {**TINY["vision"], "spatial_merge_size": 2},
}


def projector_tensors() -> list[Tensor]:
    shapes = {"v.patch_embd.weight": (32, 3, 4, 4), "v.patch_embd.weight.1": (32, 3, 4, 4)}
    shapes |= {"v.patch_embd.bias": (32,), "v.position_embd.weight": (25, 32), "v.post_ln.weight": (32,)}
    shapes |= {"v.blk.0.ffn_up.weight": (56, 32), "v.blk.0.ffn_down.weight": (32, 56)}
    shapes |= {"v.blk.1.attn_qkv.weight": (96, 32), "mm.0.weight": (128, 128), "mm.2.weight": (48, 128)}
    shapes |= {"v.deepstack.0.fc1.weight": (128, 128), "v.deepstack.2.norm.weight": (128,)}
    kinds = {"mm.0.weight": "Q8_0", "v.blk.1.attn_qkv.weight": "F16"}
    return [
        Tensor(name, kind := kinds.get(name, "F32"), shape, packed(kind, shape, seed))
        for seed, (name, shape) in enumerate(shapes.items())
    ]


def vocabulary_with_media() -> list:
    found = vocabulary("qwen2")
    for place, (key, kind, value) in enumerate(found):
        if key == "tokenizer.ggml.tokens":
            tokens = [*value[1][:-2], "<|image_pad|>", "<|video_pad|>"]
            found[place] = (key, kind, (value[0], tokens))
    return found


WHOLE = Tensor("output_norm.weight", "F32", (48,), packed("F32", (48,), 0))
TEXT = write(text_keys(CONFIG) + vocabulary_with_media(), [WHOLE])
PROJECTOR = write(vision_keys(CONFIG), projector_tensors())
PARTS = [
    write(text_keys(CONFIG) + vocabulary_with_media() + [("split.count", UINT32, 2)], []),
    write([("split.no", UINT32, 1), ("split.count", UINT32, 2)], projector_tensors()[:4]),
]


@pytest.fixture
def files(tmp_path):
    """Return the paths of the text model and its projector."""
    paths = tmp_path / "model.gguf", tmp_path / "mmproj.gguf"
    for path, written in zip(paths, (TEXT, PROJECTOR), strict=True):
        path.write_bytes(written.data)
    return paths


def refused(path, measures: bool) -> bool:
    """Return whether the reader refuses the model. `measures`: also check the memory used."""
    return measured(read, path, MEMORY) if measures else read(path)


def read(path) -> bool:
    """Read the whole model. Return whether the reader refuses the model."""
    try:
        opened = GGUFModel(path)
        for name in FILES[: 3 if opened.projector else 1]:
            opened.file(name)
        if opened.projector:
            read_config(path)
        for entry in opened.tensors(lambda name: name).values():
            assert entry.start + entry.num_bytes <= entry.path.stat().st_size
            pieces = [values.shape for _, values in entry.pieces(0, entry.shape[0])]
            assert sum(shape[0] for shape in pieces) == entry.shape[0]
            assert all(shape[1:] == entry.shape[1:] for shape in pieces)
    except ModelError as error:
        said = str(error)
        assert said.startswith(str(path.parent)) and "\n" not in said and len(said) < 600, said
        return True
    return False


def test_the_valid_files_are_read(files):
    assert not refused(files[0], measures=True)
    assert len(GGUFModel(files[0]).tensors(lambda name: name)) == len(projector_tensors())


def test_fields_of_the_projector_written_over(files):
    """To save time, the test overwrites only a fifth of the fields."""
    rng, count, tried = random.Random("fields"), 0, 0
    spans = [span for span in PROJECTOR.spans if span[2]]
    for name, start, size in rng.sample(spans, len(spans) // 5):
        for value in written_over(name, start, size, rng):
            data = bytearray(PROJECTOR.data)
            data[start : start + size] = value
            files[1].write_bytes(data)
            count += refused(files[0], measures=tried % 20 == 0)
            tried += 1
    assert tried > 300 and tried // 3 < count < tried, f"{count} of {tried}"


def test_projectors_cut_off_anywhere(files):
    header = max(start + size for _, start, size in PROJECTOR.spans)
    for number, place in enumerate([*range(0, header, 7), *range(header, len(PROJECTOR.data), 1999)]):
        files[1].write_bytes(PROJECTOR.data[:place])
        assert refused(files[0], measures=number % 20 == 0), place


@pytest.mark.parametrize("place", [0, 1])
def test_damaged_parts(tmp_path, place):
    paths = [tmp_path / f"m-0000{number}-of-00002.gguf" for number in (1, 2)]
    for path, written in zip(paths, PARTS, strict=True):
        path.write_bytes(written.data)
    assert not refused(paths[0], measures=True)
    sound, rng, count = PARTS[place], random.Random(place), 0
    header = max(start + size for _, start, size in sound.spans)
    for number in range(200):
        data = bytearray(sound.data)
        for _ in range(rng.choice((1, 2, 5))):
            at = rng.randrange(min(header, 1500))
            data[at : at + 8] = rng.choice([rng.choice(WILD[8]).to_bytes(8, "little"), rng.randbytes(8)])
        paths[place].write_bytes(bytes(data[: len(sound.data)]))
        count += refused(paths[0], measures=number % 20 == 0)
    assert 60 < count <= 200


def test_damage_of_the_projector_s_settings(files):
    """If a key is missing or has another type, the reader refuses the file or uses a documented default."""
    keys, count = vision_keys(CONFIG), 0
    for place, (key, kind, value) in enumerate(keys):
        others = [(UINT32, 7), (8, "text"), (7, True), (6, 1e30), (6, float("nan")), (9, (4, [1, 2]))]
        for changed in ([], *([(key, *other)] for other in others if other != (kind, value))):
            written = write([*keys[:place], *changed, *keys[place + 1 :]], projector_tensors())
            files[1].write_bytes(written.data)
            count += refused(files[0], measures=False)
    assert count > 3 * len(keys)
