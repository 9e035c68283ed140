"""Tests `mmengine embed` with tiny random embedding models."""

import json
import random

import numpy as np
import pytest

from mmengine import Engine
from mmengine_shapes.scenes import random_scene
from tests.cli.cli_process import call_cli
from tests.pooling.pooled_folders import embedding_folder, media_folder

SMALL = ("--dtype", "float32", "--set", "num_blocks=300", "--set", "max_model_len=900")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    made = tmp_path_factory.mktemp("embed")
    embedding_folder(made)
    return made


def lines_of(text):
    return {line["custom_id"]: line for line in map(json.loads, text.splitlines())}


def test_texts_lines_and_matrices_have_the_engines_vectors(folder, tmp_path):
    with Engine(folder, dtype="float32", num_blocks=300, max_model_len=900) as engine:
        wanted = engine.embed(["the cat", "the end"], dimensions=8)
    told = call_cli("embed", "the cat", "the end", "--model", folder, "--dimensions", 8, *SMALL)
    found = lines_of(told.stdout)
    assert np.allclose([found[name]["embedding"] for name in "01"], wanted, atol=1e-6), told.stderr
    inputs = tmp_path / "inputs.jsonl"
    inputs.write_text('"the cat"\n\n{"custom_id": "b", "text": "the end"}\n')
    for name in ("vectors.npy", "vectors.jsonl"):
        out = tmp_path / name
        told = call_cli(
            "embed", "--inputs", inputs, "--out", out, "--model", folder, "--dimensions", 8, *SMALL
        )
        assert (told.returncode, told.stdout) == (0, ""), told.stderr
        assert f"{out}: 2 vectors\n" in told.stderr
    assert np.allclose(np.load(tmp_path / "vectors.npy"), wanted, atol=1e-6)
    found = lines_of((tmp_path / "vectors.jsonl").read_text())
    assert np.allclose([found[name]["embedding"] for name in ("1", "b")], wanted, atol=1e-6)


def test_an_interrupted_file_is_continued_and_errors_are_lines(folder, tmp_path):
    inputs, out = tmp_path / "inputs.jsonl", tmp_path / "out.jsonl"
    listed = [{"custom_id": f"n{n}", "text": f"text {n}"} for n in range(4)]
    listed[2]["text"] = "too long " * 900
    inputs.write_text("".join(json.dumps(each) + "\n" for each in listed))
    out.write_text('{"custom_id":"n1","embedding":[1.0]}\n{"custom_id":"n0","embed')
    for _ in range(2):
        told = call_cli("embed", "--inputs", inputs, "--out", out, "--model", folder, *SMALL)
        assert told.returncode == 1 and "1 of 4 inputs have no vector" in told.stderr
        assert f"{out}: 3 vectors\n" in told.stderr
        assert "of 4 vectors exist" in told.stderr
        found = lines_of(out.read_text())
        assert found["n1"]["embedding"] == [1.0] and len(found["n0"]["embedding"]) == 48
        assert "tokens" in found["n2"]["error"]["message"] and len(found) == 4


def test_pictures_of_a_folder(tmp_path):
    model, pictures = tmp_path / "model", tmp_path / "pictures"
    media_folder(model, "Pooling", Pooling={"pooling_mode": "lasttoken"})
    pictures.mkdir()
    for number in range(2):
        random_scene(random.Random(number)).draw().save(pictures / f"{number}.png")
    (pictures / "notes.txt").write_text("no picture")
    told = call_cli("embed", "--images", pictures, "--model", model, "--dtype", "float32")
    found = lines_of(told.stdout)
    assert list(found) == [str(pictures / "0.png"), str(pictures / "1.png")], told.stderr
    assert all("embedding" in each for each in found.values())


@pytest.mark.parametrize(
    ("given", "what"),
    [
        ((), "give a text, --images or --inputs"),
        (("a", "--out", "vectors.csv"), "must end in .jsonl or .npy"),
        (("--inputs", "missing.jsonl"), "missing.jsonl cannot be read: No such file"),
        (("--inputs", "wrong.jsonl"), "wrong.jsonl: line 2 is not a JSON string or object"),
        (("--inputs", "twice.jsonl"), "line 2 repeats the custom_id 'a'"),
        (("--images", "empty"), "the folder has no picture"),
        (("--images", "nowhere"), "no such file or folder"),
        (("a", "--out", "others.jsonl"), "line 1 has no vector for these inputs"),
    ],
)
def test_bad_input_is_refused_before_the_model_is_loaded(tmp_path, given, what):
    (tmp_path / "wrong.jsonl").write_text('"a"\n[1]\n')
    (tmp_path / "twice.jsonl").write_text('{"custom_id": "a", "text": "x"}\n' * 2)
    (tmp_path / "others.jsonl").write_text('{"custom_id": "other", "embedding": [1]}\n')
    (tmp_path / "empty").mkdir()
    told = call_cli("embed", *given, "--model", "no-such-folder", cwd=tmp_path)
    assert told.returncode == 2 and what in told.stderr, told.stderr
