"""Tests benchmarks/rivals/images_cpu.py without llama.cpp. Times are not checked."""

import random
import sys

import numpy as np
import pytest

from mmengine_shapes import checkpoint_path
from mmengine_shapes.scenes import random_scene
from tests.gguf.vision import write_pair

SIDE = 256


def picture(folder, seed):
    scene = random_scene(random.Random(seed)).draw().resize((SIDE, SIDE))
    np.save(path := folder / f"picture-{seed}.npy", np.asarray(scene))
    return str(path)


@pytest.fixture
def side(module, tmp_path):
    rivals = module("rivals.rivals_cpu")
    files = write_pair(checkpoint_path(), tmp_path, "BF16", "F32")
    process = rivals.Process([sys.executable, rivals.HERE / "mmengine_image_side.py", *files, "1"], 1)
    yield process
    process.close()


def test_a_second_question_keeps_the_picture(side, tmp_path):
    """A second question about the same picture hits the prefix cache. A question about another picture does
    not.
    """
    first = side.ask(picture=picture(tmp_path, 1), question="What is it?", keeps=False)
    side.ask(output="features", path=str(tmp_path / "features.npy"))
    side.ask(output="logits", path=str(tmp_path / "logits.npy"))
    second = side.ask(picture=picture(tmp_path, 1), question="And where is it?", keeps=True)
    other = side.ask(picture=picture(tmp_path, 2), question="What is it?", keeps=False)
    count = first["num_image_tokens"]
    assert count == SIDE**2 // 32**2 == second["num_image_tokens"]
    assert first["num_kept_tokens"] == other["num_kept_tokens"] == 0
    assert count <= second["num_kept_tokens"] <= count + len(first["text_ids"])
    assert first["text_ids"] == other["text_ids"] != second["text_ids"]
    assert np.load(tmp_path / "features.npy").shape[0] == count
    assert np.load(tmp_path / "logits.npy").argmax() == first["first_token"]


def test_targets_divide_by_llama_cpp_of_the_same_question(module):
    """Each target is mmengine's time divided by llama.cpp's time. The second question has two targets:
    llama.cpp computes the whole prompt, or only the text after the picture.
    """
    images = module("rivals.images_cpu")

    def figures(*seconds):
        return [{"seconds": each, "cpu": each / 2, "prepared": 0.1} for each in seconds]

    found = {
        images.OURS: {images.FIRST: figures(1, 2, 9), images.SECOND: figures(1)},
        images.THEIRS: {images.FIRST: figures(4), images.SECOND: figures(2), images.AGAIN: figures(20)},
    }
    targets = [each for each in images._targets("a model", found) if each.name.endswith("elapsed")]
    assert [each.measured for each in targets] == [2 / 4, 1 / 20, 1 / 2]
    assert [each.reaches(each.bar) for each in targets] == [True, True, False]
