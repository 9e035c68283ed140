"""Tests of malicious model files: named pipes, and tokenizers that panic or exhaust time or memory."""

import base64
import json
import os
import pathlib

import pytest

from mmengine.checkpoint.files import read_json, read_range
from mmengine.checkpoint.mapped_file import MappedFile
from mmengine.cli.logs.decoding import decoder_of
from mmengine.errors import InvalidRequest, ModelError
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
    monkeypatch.setattr(tokens, "check_tokenizer", lambda data: None)
    tokenizer["model"]["continuing_subword_prefix"] = "#####"
    with pytest.raises(ModelError, match="not a readable tokenizer"):
        ChatTokenizer(tokenizer, "tokenizer.json")


def test_a_merge_without_its_product_is_refused(tokenizer):
    first, second = tokenizer["model"]["merges"][5]
    del tokenizer["model"]["vocab"][first + second]
    with pytest.raises(ModelError, match="not a readable tokenizer"):
        ChatTokenizer(tokenizer, "tokenizer.json")


def test_a_regular_expression_that_takes_too_long_fails_the_text(tokenizer):
    """The tokenizers library panics at the regular expression's retry limit, and `except Exception` does not
    catch a panic.
    """
    pattern = {"type": "Split", "pattern": {"Regex": "(a+)+$"}, "behavior": "Isolated", "invert": False}
    tokenizer["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [pattern, tokenizer["pre_tokenizer"]]}
    made = ChatTokenizer(tokenizer, "tokenizer.json")
    for read in (made.encode, lambda text: made.encode(text, allow_special=True)):
        with pytest.raises(InvalidRequest, match="the model's tokenizer fails on this text .*retry-limit"):
            read("a" * 40 + "b")
    with pytest.raises(InvalidRequest, match="fails on this text"):
        made.exceeds("a" * 40 + "b" * 40_000, 100)
    assert made.decode(made.encode("red")) == "red"


def replace(pattern, content):
    return {"type": "Replace", "pattern": pattern, "content": content}


DOUBLING = [replace({"String": "a"}, "aa")] * 40
CHARSMAP = base64.b64encode((4).to_bytes(4, "little") + b"trie" + b"b" * 5000 + b"\0").decode()


@pytest.mark.parametrize(
    "part",
    [
        {"type": "Sequence", "normalizers": DOUBLING},
        {"type": "Sequence", "normalizers": [{"type": "Sequence", "normalizers": DOUBLING[:9]}] * 2},
        replace({"String": "a"}, "b" * 2000),
        replace({"Regex": "a*"}, "b" * 1024),
        {"type": "Prepend", "prepend": "b" * 1024},
        {"type": "Precompiled", "precompiled_charsmap": CHARSMAP},
    ],
)
def test_a_tokenizer_that_lengthens_texts_without_limit_is_refused(tokenizer, part):
    """Forty doublings turn the letter "a" into a terabyte."""
    tokenizer["normalizer"] = part
    with pytest.raises(ModelError, match="not a readable tokenizer") as found:
        ChatTokenizer(tokenizer, "tokenizer.json")
    assert "lengthens a text more than 1024 times" in str(found.value.__cause__)


def test_a_decoder_that_lengthens_texts_without_limit_is_refused(tokenizer):
    tokenizer["decoder"] = {"type": "Sequence", "decoders": DOUBLING}
    with pytest.raises(ModelError, match="not a readable tokenizer"):
        ChatTokenizer(tokenizer, "tokenizer.json")


def test_the_tokenizer_of_the_log_commands_may_be_a_strangers(tokenizer, tmp_path, capfd):
    """The log commands' option --tokenizer refuses an invalid tokenizer and a named pipe."""
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps(tokenizer))
    assert "red" in decoder_of(tmp_path)(ChatTokenizer.of_folder(tmp_path).encode("red"))
    tokenizer["model"]["continuing_subword_prefix"] = "##"
    path.write_text(json.dumps(tokenizer))
    with pytest.raises(ModelError, match="not a readable tokenizer"):
        decoder_of(tmp_path)
    assert not capfd.readouterr().err, "no traceback of the library"
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(ModelError, match="not a regular file"):
        decoder_of(tmp_path)
