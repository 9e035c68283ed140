"""Tests damaged GGUF files: Gemma 3 with a SentencePiece vocabulary, Qwen2-VL and Qwen2.5-VL. The reader must
use little memory, and either read a damaged file or raise a one-line ModelError.
"""

import random
from pathlib import Path
from typing import NamedTuple

import pytest

from mmengine.checkpoint.gguf.model import CONFIG, MEDIA_FILES, TEXT_FILES, GGUFModel, has_file
from mmengine.checkpoint.gguf.pair import gguf_file, pair
from mmengine.errors import ModelError
from tests.gguf import hosted
from tests.gguf.test_gguf_damage import measured, written_over
from tests.gguf.test_gguf_sentence_pieces import vocabulary as sentence_pieces
from tests.gguf.vision import decoder_keys
from tests.gguf.writing import STRING, Tensor, Written, packed, vocabulary, write

MEMORY = 6 * 2**20  # Limit in bytes for reading two files of less than 0.1 MB.
TEXT = {
    "num_hidden_layers": 2,
    "max_position_embeddings": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "rms_norm_eps": 1e-6,
    "sliding_window": 8,
    "rope_parameters": {"full_attention": {"rope_theta": 1e6}, "rope_theta": 1e6},
}
VISION = {"patch_size": 14, "hidden_size": 32, "intermediate_size": 64, "layer_norm_eps": 1e-6}
SIGLIP = VISION | {"image_size": 56, "num_hidden_layers": 2, "num_attention_heads": 2}
QWEN = VISION | {"depth": 2, "num_heads": 2, "embed_dim": 32, "mlp_ratio": 2, "fullatt_block_indexes": [1]}
PATCHES = {"v.patch_embd.weight": (32, 3, 14, 14), "v.patch_embd.weight.1": (32, 3, 14, 14)}
MLP = {"v.blk.0.ffn_up.weight": (64, 32), "v.blk.0.ffn_down.weight": (32, 64)}
APART = {f"v.blk.0.attn_{part}.weight": (32, 32) for part in "qkv"}
SHAPES = {
    "gemma3": {"v.patch_embd.weight": (32, 3, 14, 14), "v.position_embd.weight": (16, 32), **MLP}
    | {"mm.soft_emb_norm.weight": (32,), "mm.input_projection.weight": (32, 64)},
    "qwen2_vl": PATCHES | MLP | APART,
    "qwen2_5_vl": PATCHES | MLP | APART | {"v.blk.0.ffn_gate.weight": (64, 32)},
}


class Pair(NamedTuple):
    text: Written
    projector: Written


def tensors(shapes: dict[str, tuple[int, ...]]) -> list[Tensor]:
    return [
        Tensor(name, "F32", shape, packed("F32", shape, seed))
        for seed, (name, shape) in enumerate(shapes.items())
    ]


def with_tokens(words: list, *names: str) -> list:
    """Return the vocabulary keys `words` with the first tokens renamed to `names`."""
    found = []
    for key, kind, value in words:
        if key == "tokenizer.ggml.tokens":
            value = (STRING, [*names, *value[1][len(names) :]])
        found.append((key, kind, value))
    return found


def pair_of(family: str) -> Pair:
    if family == "gemma3":
        config = {"vision_config": SIGLIP, "text_config": TEXT, "mm_tokens_per_image": 4}
        names = ("<image_soft_token>", "<start_of_image>", "<end_of_image>")
        words = with_tokens(sentence_pieces(0)[0], *names)
        keys, clip = hosted.gemma_keys(TEXT), hosted.gemma_clip(config)
    else:
        config = {"vision_config": QWEN, "text_config": TEXT, "model_type": family}
        names = tuple(f"<|{name}|>" for name in ("image_pad", "video_pad", "vision_start", "vision_end"))
        words = with_tokens(vocabulary("qwen2"), *names)
        rope = {"rope.dimension_sections": (9, (5, [2, 3, 3, 0]))}
        keys, clip = decoder_keys(TEXT, "qwen2vl", **rope), hosted.qwen_clip(config)
    text = {"output_norm.weight": (64,), "token_embd.weight": (16, 64), "blk.0.ffn_norm.weight": (64,)}
    return Pair(write(keys + words, tensors(text)), write(clip, tensors(SHAPES[family])))


@pytest.fixture(params=SHAPES)
def sound(request, tmp_path):
    """Write a family's two files to tmp_path, and return both."""
    found = pair_of(request.param)
    for name, written in zip(("model.gguf", "mmproj.gguf"), found, strict=True):
        (tmp_path / name).write_bytes(written.data)
    return found


def read(path) -> bool:
    """Read everything in the model. Return True if the reader refused the model."""
    try:
        for name in (CONFIG, *TEXT_FILES, *MEDIA_FILES):
            if has_file(path, name):
                GGUFModel(path).file(name)
        for entry in GGUFModel(path).tensors(str).values():
            pieces = [values.shape for _, values in entry.pieces(0, entry.shape[0])]
            assert sum(shape[0] for shape in pieces) == entry.shape[0]
            assert all(shape[1:] == entry.shape[1:] for shape in pieces)
    except ModelError as error:
        said = str(error)
        assert said.startswith(str(gguf_file(path).parent)) and "\n" not in said and len(said) < 600, said
        return True
    return False


def named(folder: Path) -> Path:
    """Return a path that names model and projector, so that the reader cannot ignore the projector."""
    return Path(pair(folder / "model.gguf", folder / "mmproj.gguf"))


def test_the_valid_files_are_read(sound, tmp_path):
    assert not measured(read, named(tmp_path), MEMORY)


@pytest.mark.parametrize("part", [0, 1])
def test_fields_written_over(sound, tmp_path, part):
    """Overwrites up to 60 random header fields, but no tokens, token types or scores."""
    rng, count, tried, name = random.Random(part), 0, 0, named(tmp_path)
    written, path = sound[part], tmp_path / ("model.gguf", "mmproj.gguf")[part]
    spans = [span for span in written.spans if span[2] and "ggml.tokens " not in span[0]]
    spans = [span for span in spans if "token_type " not in span[0] and "scores " not in span[0]]
    for field, start, size in rng.sample(spans, min(len(spans), 60)):
        for value in written_over(field, start, size, rng)[::2]:
            data = bytearray(written.data)
            data[start : start + size] = value
            path.write_bytes(data)
            count += measured(read, name, MEMORY) if tried % 20 == 0 else read(name)
            tried += 1
    assert tried > 100 and tried // 4 < count < tried, f"{count} of {tried}"


def test_projectors_cut_off_anywhere(sound, tmp_path):
    for place in range(0, len(sound.projector.data), len(sound.projector.data) // 60):
        (tmp_path / "mmproj.gguf").write_bytes(sound.projector.data[:place])
        assert read(named(tmp_path)), place
