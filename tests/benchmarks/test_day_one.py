"""Tests benchmarks/cpu/day_one.py with a small model. Times are not checked."""

import json

import pytest

from mmengine.checkpoint.tensors import weight_files
from tests.benchmarks.test_throughput import call


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Return a function that returns a small checkpoint's folder. The function's first call makes the
    checkpoint.
    """
    folder = tmp_path_factory.mktemp("day_one") / "model"

    def make(model):
        if not folder.is_dir():
            model.make(folder, None, small=True)
        return folder

    return make


def test_a_checkpoint_is_sharded_and_answers_about_a_photograph(module, made, tmp_path):
    model, side = module("common.large_model"), module("cpu.day_one_side")
    folder = made(model)
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    assert len(weight_files(folder)) == len(side.shards(folder)) > 2
    size = sum(path.stat().st_size for path in side.shards(folder))
    assert 0.99 * size < index["metadata"]["total_size"] < size
    picture = model.photograph(tmp_path / "photograph.jpg", 96, 64)
    side.drop(folder)
    assert side.dd_s(folder) > 0
    peaks = side.Peaks()
    found = side.mmengine(folder, [picture], [1, 2])
    peaks.end()
    assert len(found.first_s) == 1 and found.rates.keys() == {1, 2} and min(found.rates.values()) > 0
    assert 0 < peaks.private <= side.status("VmHWM") and found.kv_bytes > 2**20
    assert "KV pool of" in found.line


@pytest.mark.soak
def test_both_sides_and_the_table(tmp_path):
    printed = call("day_one", "--quick", "--telephone", 60, "--out", tmp_path / "table.md")
    table = (tmp_path / "table.md").read_text()
    for text in (
        "| dd, cold |",
        "| transformers, warm |",
        "load, cold, times of dd",
        "A photograph of 256 x",
    ):
        assert text in table
    assert "Targets" in printed
