"""Tests Qwen2-VL and Qwen2.5-VL as GGUF files against safetensors folders with the same weights.

The processors need torchvision. The test of answers runs in a separate process, which finds build/torchvision
before it imports transformers.
"""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import transformers

from mmengine.checkpoint.gguf.model import GGUFModel
from mmengine.checkpoint.gguf.pair import pair
from mmengine.checkpoint.model_files import model_note
from mmengine.errors import ModelError
from mmengine.models.registry import plugin_for
from mmengine_transformers import plugin
from tests.any_model.factories import Factory, write_factory
from tests.any_model.factories_grid import FACTORIES
from tests.gguf.hosted import write_qwen2_vl
from tests.gguf.vision import package_reader, weights_of
from tests.gguf.writing import ARRAY, BOOL, FLOAT32, UINT32

ROOT = Path(__file__).resolve().parents[2]
KINDS = ("qwen2_vl", "qwen2_5_vl")
# Fields in transformers' config.json that are compared separately, or for which GGUF has no key.
UNSTATED = {
    *("dtype", "transformers_version", "initializer_range", "attention_dropout", "use_cache", "layer_types"),
    *("max_window_layers", "sliding_window", "use_sliding_window", "rope_parameters", "attention_bias"),
    *("mlp_bias", "head_dim", "window_size", "tokens_per_second", "tie_word_embeddings", "architectures"),
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("qwen2_vl")
    for kind in KINDS:
        write_model(kind, root / kind)
    return root


def write_model(kind: str, folder: Path) -> None:
    """Write the checkpoint without its processor."""
    write_factory(Factory(FACTORIES[kind].words, FACTORIES[kind].model), folder)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("options", [{}, {"swaps": True}, {"fused": True}], ids=["new", "old", "fused"])
def test_the_files_have_the_folder_s_tensors(folders, tmp_path, kind, options):
    if kind == "qwen2_5_vl" and "swaps" in options:
        options = options | {"vision": {"feed_forward_length": (UINT32, 0)}}  # The oldest files store 0.
    found = GGUFModel(write_qwen2_vl(folders / kind, tmp_path, **options)).tensors(str)
    theirs = weights_of(folders / kind)
    assert found.keys() == theirs.keys()
    for name, entry in found.items():
        assert entry.shape == theirs[name].shape, name
        values = np.concatenate([rows for _, rows in entry.pieces(0, entry.shape[0])])
        assert np.array_equal(values, theirs[name]), name
        middle = entry.shape[0] // 2
        (at, rows), *_ = entry.pieces(middle, entry.shape[0])
        assert at == 0 and np.array_equal(rows, theirs[name][middle : middle + len(rows)]), name


@pytest.mark.parametrize("kind", KINDS)
def test_the_config_is_the_folder_s(folders, tmp_path, kind):
    model = write_qwen2_vl(folders / kind, tmp_path)
    mine, theirs = (
        GGUFModel(model).file("config.json"),
        json.loads((folders / kind / "config.json").read_text()),
    )
    assert mine["architectures"] == theirs["architectures"]
    for part in ("text_config", "vision_config"):
        wanted = {name: value for name, value in theirs[part].items() if name not in UNSTATED}
        assert {name: mine[part].get(name) for name in wanted} == {
            name: pytest.approx(value) if name == "rms_norm_eps" else value for name, value in wanted.items()
        }
    rope = mine["text_config"]["rope_parameters"]
    assert rope == theirs["text_config"]["rope_parameters"]
    named = ("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id", "model_type")
    assert {name: mine[name] for name in named} == {name: theirs[name] for name in named}
    transformers.AutoConfig.for_model(**mine)  # Raises if transformers refuses a field.
    title = "Qwen2-VL" if kind == "qwen2_vl" else "Qwen2.5-VL"
    said = f"projector mmproj-F32.gguf with the pixel limits of {title}'s processor (3,136 to 12,845,056)"
    assert model_note(model) == said
    assert plugin_for(model) is plugin


def test_layers_without_windows(folders, tmp_path):
    """In llama.cpp's files, every `n_wa_pattern`-th layer has no window; with 0, no layer has a window."""
    for depth, every, layers in ((32, 8, [7, 15, 23, 31]), (4, 0, [0, 1, 2, 3]), (2, 1, [0, 1])):
        vision = {"block_count": (UINT32, depth), "n_wa_pattern": (UINT32, every)}
        model = write_qwen2_vl(folders / "qwen2_5_vl", tmp_path, vision=vision)
        config = GGUFModel(model).file("config.json")["vision_config"]
        assert config["fullatt_block_indexes"] == layers and config["window_size"] == 112


def test_without_a_projector_the_text_model_is_described(folders, tmp_path):
    model = Path(pair(write_qwen2_vl(folders / "qwen2_vl", tmp_path), "none"))
    assert GGUFModel(model).file("config.json")["architectures"] == ["Qwen2ForCausalLM"]
    assert model_note(model) == "text only, because no projector is beside the model (--mmproj)"
    config = plugin_for(model).read_config(model)
    assert config.text.qkv_bias and config.text.num_layers == 4


def test_projectors_that_do_not_fit_are_refused(folders, tmp_path):
    changes = (
        ({"attention.layer_norm_epsilon": (FLOAT32, 1e-5)}, "epsilon is 1e-05; Qwen2-VL has 1e-06"),
        ({"projection_dim": (UINT32, 80)}, "projects to 80 values, but model-F32.gguf has embeddings of 64"),
        ({"embedding_length": (UINT32, 48)}, "ffn_up.weight has 128 rows, not a multiple of the hidden size"),
        ({"image_mean": (ARRAY, (BOOL, [True] * 3))}, "clip.vision.image_mean holds no floats"),
    )
    for vision, said in changes:
        model = write_qwen2_vl(folders / "qwen2_vl", tmp_path, vision=vision)
        with pytest.raises(ModelError, match=said):
            for name in ("config.json", "preprocessor_config.json"):
                GGUFModel(model).file(name)


@pytest.mark.soak
def test_the_files_answer_like_the_folder(tmp_path):
    if not (ROOT / "build" / "torchvision" / ".ready").exists():
        pytest.skip("needs build/torchvision, which make soak could not get")
    command = [sys.executable, "-W", "ignore", "-m", "tests.gguf.qwen2_vl_answers", tmp_path]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_written_files_are_those_of_the_gguf_package(folders, tmp_path):
    model = write_qwen2_vl(folders / "qwen2_5_vl", tmp_path)
    for path in (model, tmp_path / "mmproj-F32.gguf"):
        package_reader(path)
