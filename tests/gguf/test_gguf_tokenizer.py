"""Tests that a GGUF file's vocabulary is converted to tokenizer.json and tokenizer_config.json."""

import json

import pytest
import tokenizers

from mmengine.checkpoint.gguf.model import GGUFModel
from mmengine.errors import ModelError
from tests.gguf.writing import (
    ARRAY,
    BOOL,
    FLOAT32,
    INT32,
    STRING,
    UINT32,
    byte_characters,
    model,
    vocabulary,
    write,
)

BYTES = byte_characters()


@pytest.fixture
def opened(tmp_path):
    def put(cut="smollm", template=None, **more):
        path = tmp_path / "model.gguf"
        keys = model() + vocabulary(cut, **more)
        if template is not None:
            keys.append(("tokenizer.chat_template", STRING, template))
        path.write_bytes(write(keys).data)
        return GGUFModel(path)

    return put


def made(data) -> tokenizers.Tokenizer:
    return tokenizers.Tokenizer.from_str(json.dumps(data))


def test_ids_are_indices_in_the_list(opened):
    data = opened().file("tokenizer.json")
    tokenizer = made(data)
    assert [(token["id"], token["content"], token["special"]) for token in data["added_tokens"]] == [
        (0, "<|start|>", True),
        (1, "<|end|>", True),
        (261, "<think>", False),
    ]
    assert all(tokenizer.token_to_id(token["content"]) == token["id"] for token in data["added_tokens"])
    assert tokenizer.encode("<|start|>hell").ids == [0, 260]
    assert tokenizer.encode("<think>he").ids == [261, 258]
    assert tokenizer.encode(" ü").ids == [2 + byte for byte in " ü".encode()]
    assert (
        tokenizer.decode([0, 260, 2 + 0xC3, 2 + 0xBC, 261], skip_special_tokens=False)
        == "<|start|>hellü<think>"
    )


def test_no_text_becomes_a_special_token(opened):
    tokenizer = made(opened().file("tokenizer.json"))
    tokenizer.encode_special_tokens = True
    assert tokenizer.encode("<|start|>").ids == [2 + byte for byte in b"<|start|>"]


def test_padding_tokens_are_never_text(opened):
    model = opened()
    data = model.file("tokenizer.json")
    assert "[PAD262]" not in json.dumps(data)
    assert made(data).encode("[PAD262]").ids == [2 + byte for byte in b"[PAD262]"]
    assert model.file("config.json")["vocab_size"] == 263
    unnamed = ["<|start|>", "<|end|>", *BYTES, "he", "ll", "hell", "", "[PAD262]"]
    told = opened(tokens=(ARRAY, (STRING, unnamed)), token_type=(ARRAY, (INT32, [3, 3, *[1] * 259, 4, 4])))
    assert [token["id"] for token in told.file("tokenizer.json")["added_tokens"]] == [0, 1]


def test_special_tokens_at_the_end_are_added_ones_only(opened):
    """Special tokens at the list's end are not in the BPE vocabulary, so no merge can produce them."""
    tokens = [*BYTES, "he", "ll", "hell", "<|start|>", "<|end|>"]
    types = [1] * 259 + [3, 3]
    told = opened(
        tokens=(ARRAY, (STRING, tokens)),
        token_type=(ARRAY, (INT32, types)),
        bos_token_id=(UINT32, 259),
        eos_token_id=(UINT32, 260),
    )
    data = told.file("tokenizer.json")
    assert "<|start|>" not in data["model"]["vocab"] and len(data["model"]["vocab"]) == 259
    assert made(data).encode("<|end|>hell").ids == [260, 258]


@pytest.mark.parametrize(
    ("pre", "text", "pieces"),
    [
        ("smollm", "a  12", ["a", "ĠĠ", "1", "2"]),
        ("starcoder", "a  12", ["a", "ĠĠ", "1", "2"]),
        ("gpt-2", "a  12", ["a", "Ġ", "Ġ12"]),
        ("qwen2", "a  12's", ["a", "Ġ", "Ġ", "1", "2", "'s"]),
        ("qwen2", "e\u0301a", ["e", "Ìģa"]),
        ("qwen35", "x\u0323\u0301a 12", ["xÌ£Ìģa", "Ġ", "1", "2"]),
        ("llama-bpe", "a1234 I'LL", ["a", "123", "4", "ĠI", "'LL"]),
        ("llama3", "a1234", ["a", "123", "4"]),
        ("llama-v3", "a1234", ["a", "123", "4"]),
    ],
)
def test_texts_are_split_by_the_named_pre_tokenizer(opened, pre, text, pieces):
    pre_tokenizer = made(opened(pre).file("tokenizer.json")).pre_tokenizer
    assert [piece for piece, _ in pre_tokenizer.pre_tokenize_str(text)] == pieces


def test_other_options_of_the_pre_tokenizer(opened):
    qwen, llama = opened("qwen2").file("tokenizer.json"), opened("llama-bpe").file("tokenizer.json")
    assert made(qwen).encode("u\u0308").ids == made(qwen).encode("ü").ids
    assert made(llama).encode("u\u0308", add_special_tokens=False).ids == [
        2 + byte for byte in "u\u0308".encode()
    ]
    assert made(llama).encode("he").ids == [0, 258], "a text begins with <|start|>"
    assert made(llama).encode("he", "ll").ids == [0, 258, 0, 259]
    tokens = ["<|start|>", "<|end|>", *BYTES, "he", "ll", "hell", "lo"]
    whole = {"tokens": (ARRAY, (STRING, tokens)), "token_type": (ARRAY, (INT32, [3, 3, *[1] * 260]))}
    for pre, ids in (("llama-bpe", [261]), ("smollm", [2 + byte for byte in b"lo"])):
        found = made(opened(pre, **whole).file("tokenizer.json")).encode("lo", add_special_tokens=False).ids
        assert found == ids, "lo is a token, but no merge gives it"


def test_the_file_decides_about_the_bos_token(opened):
    for pre, says, ids in (("smollm", True, [0, 258]), ("llama-bpe", False, [258])):
        told = opened(pre, add_bos_token=(BOOL, says))
        assert made(told.file("tokenizer.json")).encode("he").ids == ids
        assert told.file("tokenizer_config.json")["add_bos_token"] is says


def test_tokenizer_config(opened):
    told = opened(template="{{ bos_token }}", unknown_token_id=(UINT32, 1), padding_token_id=(UINT32, 0))
    assert told.file("tokenizer_config.json") == {
        "bos_token": "<|start|>",
        "eos_token": "<|end|>",
        "unk_token": "<|end|>",
        "pad_token": "<|start|>",
        "add_bos_token": False,
        "chat_template": "{{ bos_token }}",
    }
    assert "chat_template" not in opened().file("tokenizer_config.json")


def test_all_end_tokens_are_listed(opened):
    assert opened().file("generation_config.json") == {"eos_token_id": [1]}
    told = opened(eot_token_id=(UINT32, 0), eom_token_id=(UINT32, 1))
    assert told.file("generation_config.json") == {"eos_token_id": [1, 0]}


def test_control_tokens_with_a_known_name_end_an_answer_too(opened):
    """As in llama.cpp, some names mark end tokens. A token with such a name ends an answer only if its type
    is control.
    """
    tokens = ["<|im_end|>", "<|endoftext|>", *BYTES, "<|eot_id|>", "</s>", "<eos>"]
    keys = {
        "tokens": (ARRAY, (STRING, tokens)),
        "token_type": (ARRAY, (INT32, [3, 3, *[1] * 256, 3, 1, 4])),
        "merges": (ARRAY, (STRING, [])),
        "eos_token_id": (UINT32, 0),
    }
    assert opened(**keys).file("generation_config.json") == {"eos_token_id": [0, 1, 258]}


TWICE = ["<|start|>", "<|end|>", *BYTES, "he", "ll", "hell", "he", "[PAD262]"]
REFUSED = {
    "another model": (
        {"model": (STRING, "bert")},
        "tokenizer.ggml.model is 'bert'; supported are gpt2",
    ),
    "no model": ({"model": (UINT32, 2)}, "tokenizer.ggml.model is 2"),
    "another cut": (
        {"pre": (STRING, "tekken")},
        "tokenizer.ggml.pre is 'tekken'; supported are gpt-2, llama-bpe",
    ),
    "no cut": ({"pre": (BOOL, True)}, "tokenizer.ggml.pre is True"),
    "no tokens": ({"tokens": (STRING, "he")}, "tokenizer.ggml.tokens is missing or not an array"),
    "numbers for tokens": ({"tokens": (ARRAY, (INT32, [1, 2]))}, "tokenizer.ggml.tokens holds no strings"),
    "tokens that are no texts": (
        {"tokens": (ARRAY, (STRING, [b"\xff"] * 2))},
        "ggml.tokens is damaged",
    ),
    "no types": ({"token_type": (UINT32, 1)}, "token_type is missing or not an array"),
    "types in words": ({"token_type": (ARRAY, (STRING, ["1"]))}, "token_type holds no integers"),
    "types with commas": ({"token_type": (ARRAY, (FLOAT32, [1]))}, "token_type holds no integers"),
    "fewer types": ({"token_type": (ARRAY, (INT32, [1]))}, "has 263 tokens but 1 token types"),
    "a token twice": ({"tokens": (ARRAY, (STRING, TWICE))}, "tokens has a token twice"),
    "no merges": ({"merges": (UINT32, 1)}, "merges is missing or not an array"),
    "half a merge": ({"merges": (ARRAY, (STRING, ["he"]))}, "merge 'he' does not join two tokens to one"),
    "a merge of none": (
        {"merges": (ARRAY, (STRING, ["h xx"]))},
        "merge 'h xx' does not join two tokens to one",
    ),
    "a merge to none": (
        {"merges": (ARRAY, (STRING, ["h h"]))},
        "merge 'h h' does not join two tokens to one",
    ),
    "an id beyond": (
        {"eos_token_id": (UINT32, 263)},
        "eos_token_id is 263; it must be an integer from 0 to 262",
    ),
    "an id in words": ({"bos_token_id": (STRING, "0")}, "bos_token_id is '0'; it must be an integer"),
    "a truth in words": (
        {"add_bos_token": (STRING, "yes")},
        "add_bos_token is 'yes'; it must be true or false",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_errors_name_the_wrong_field(opened, name):
    more, said = REFUSED[name]
    with pytest.raises(ModelError, match=said):
        told = opened(**more)
        for file in ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"):
            told.file(file)


def test_a_merge_to_a_special_token(opened):
    """With this merge, a user's text could become a special token."""
    tokens = ["<|start|>", "<|end|>", *BYTES, "<|", "start|>", "xx", "yy", "zz"]
    merges = ["< |", "<| start|>"]
    with pytest.raises(ModelError, match=r"merge '<\| start\|>' does not join two tokens to one"):
        opened(tokens=(ARRAY, (STRING, tokens)), merges=(ARRAY, (STRING, merges))).file("tokenizer.json")
