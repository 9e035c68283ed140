"""Tests of model files that a stranger wrote: pipes, and a tokenizer on which the library panics."""

import json
import os
import pathlib

import pytest

from mmengine.checkpoint.files import read_json, read_range
from mmengine.checkpoint.mapped_file import MappedFile
from mmengine.errors import ModelError
from mmengine.processing.chat import tokens
from mmengine.processing.chat.tokens import ChatTokenizer

shapes = pytest.importorskip("mmengine_shapes")


@pytest.mark.parametrize(
    "read",
    [
        read_json,
        MappedFile,
        lambda path: read_range(path, 0, 1, "x"),
    ],
)
def test_a_pipe_is_refused_without_waiting(tmp_path, read):
    pipe = tmp_path / "model.safetensors"
    os.mkfifo(pipe)
    with pytest.raises(ModelError, match="not a regular file"):
        read(pipe)


@pytest.fixture
def tokenizer():
    path = pathlib.Path(shapes.__file__).parent / "checkpoint" / "tokenizer.json"
    return json.loads(path.read_text())


def test_a_tokenizer_that_panics_is_refused(tokenizer, monkeypatch, capfd):
    tokenizer["model"]["continuing_subword_prefix"] = "##"
    with pytest.raises(ModelError, match="not a readable tokenizer"):
        ChatTokenizer(tokenizer, "tokenizer.json")
    assert not capfd.readouterr().err, "no traceback of the library"
    monkeypatch.setattr(tokens, "_check_prefix", lambda model: None)
    tokenizer["model"]["continuing_subword_prefix"] = "#####"
    with pytest.raises(ModelError, match="not a readable tokenizer"):
        ChatTokenizer(tokenizer, "tokenizer.json")


def test_a_merge_without_its_product_is_refused(tokenizer):
    first, second = tokenizer["model"]["merges"][5]
    del tokenizer["model"]["vocab"][first + second]
    with pytest.raises(ModelError, match="not a readable tokenizer"):
        ChatTokenizer(tokenizer, "tokenizer.json")
