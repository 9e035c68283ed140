"""Tests GGUF tokenizers with the real vocabularies of Qwen, Llama 3, StarCoder, GPT-2 and SmolLM.

The expected ids come from llama.cpp's test cases, which were computed with the models' original tokenizers.
For random texts, the expected ids come from transformers' tokenizer for the same GGUF file.
"""

import json
from functools import lru_cache
from pathlib import Path

import pytest
import tokenizers

from mmengine.checkpoint.gguf.model import GGUFModel
from tests.gguf.fetched import SMOLLM2, VOCABULARIES, fetched
from tests.gguf.texts import texts

NUM_TEXTS, NUM_SOAKED = 2_000, 20_000
DOCS = Path(__file__).parents[2] / "docs"
SEPARATOR = "\n__ggml_vocab_test__\n"
BYTES = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)


def path_of(name):
    return fetched(SMOLLM2 if name == "smollm" else f"ggml-vocab-{name}.gguf")


@lru_cache
def ours(name) -> tuple[tokenizers.Tokenizer, dict]:
    data = GGUFModel(path_of(name)).file("tokenizer.json")
    return tokenizers.Tokenizer.from_str(json.dumps(data)), data


@pytest.mark.parametrize("name", VOCABULARIES)
def test_llama_cpps_own_cases(name):
    tokenizer, _ = ours(name)
    said = fetched(f"ggml-vocab-{name}.gguf.out").read_text().splitlines()
    given = fetched(f"ggml-vocab-{name}.gguf.inp").read_text().split(SEPARATOR)
    assert len(said) == 46 and given[46:] == [""]
    for text, ids in zip(given, said):
        assert tokenizer.encode(text, add_special_tokens=False).ids == [
            int(token) for token in ids.split()
        ], text


def theirs(name) -> tokenizers.Tokenizer:
    """Return the tokenizer that transformers reads from the GGUF file, with two corrections. The corrections
    split digits before other pre-tokenization, and prevent merges in text that is already a token. Without
    them, two cases from llama.cpp fail.
    """
    integration = pytest.importorskip("transformers.integrations.gguf")
    architecture, found, _ = integration.get_gguf_tokenizer(str(path_of(name)))
    tokenizer, _ = integration.convert_gguf_tokenizer(architecture, found)
    if name in ("smollm", "starcoder"):
        digits = tokenizers.pre_tokenizers.Digits(individual_digits=True)
        tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Sequence([digits, tokenizer.pre_tokenizer])
    if name == "llama-bpe":
        tokenizer.model.ignore_merges = True
    return tokenizer


def can_spell(vocabulary, text):
    """Whether the vocabulary has a token for each byte of the text. SmolLM's lacks some bytes."""
    return all(set(word) <= vocabulary for word, _ in BYTES.pre_tokenize_str(text))


@pytest.mark.parametrize("count", [NUM_TEXTS, pytest.param(NUM_SOAKED, marks=pytest.mark.soak)])
@pytest.mark.parametrize("name", ["qwen2", "llama-bpe", "smollm"])
def test_random_texts_beside_transformers(name, count):
    """The ids equal transformers' ids, and decode to the text. Qwen's texts are normalised (NFC) first,
    because transformers' tokenizer from the GGUF file does not normalise.
    """
    (tokenizer, data), other = ours(name), theirs(name)
    compose = tokenizers.normalizers.NFC().normalize_str if name == "qwen2" else str
    vocabulary = data["model"]["vocab"].keys()
    given = [text for text in map(compose, texts(count, 1)) if can_spell(vocabulary, text)]
    assert len(given) > 0.7 * count and (name == "smollm" or len(given) == count)
    # The documents' control tokens are made invalid, because transformers adds a control token to Llama's
    # vocabulary.
    given += [compose(page.read_text()).replace("<|", "<") for page in sorted(DOCS.rglob("*.md"))]
    found = tokenizer.encode_batch(given, add_special_tokens=False)
    expected = other.encode_batch(given, add_special_tokens=False)
    for text, mine, its in zip(given, found, expected, strict=True):
        assert mine.ids == its.ids, text
    assert tokenizer.decode_batch([each.ids for each in found], skip_special_tokens=False) == given
    used = {token for each in found for token in each.ids}
    assert len(used) > 3_500 and max(used) < len(data["model"]["vocab"])


def test_qwens_texts_are_composed_first():
    tokenizer, _ = ours("qwen2")
    compose = tokenizers.normalizers.NFC().normalize_str
    changed = 0
    for text in texts(2_000, 2):
        ids = tokenizer.encode(text, add_special_tokens=False).ids
        assert ids == tokenizer.encode(compose(text), add_special_tokens=False).ids
        assert tokenizer.decode(ids, skip_special_tokens=False) == compose(text)
        changed += compose(text) != text
    assert changed > 20


@pytest.mark.parametrize(
    ("name", "count", "special"),
    [
        ("qwen2", 151_646, {"<|endoftext|>": 151_643, "<|im_start|>": 151_644, "<|im_end|>": 151_645}),
        ("llama-bpe", 128_256, {"<|begin_of_text|>": 128_000, "<|eot_id|>": 128_009}),
        ("smollm", 49_152, {"<|endoftext|>": 0, "<|im_start|>": 1, "<|im_end|>": 2}),
    ],
)
def test_special_tokens(name, count, special):
    tokenizer, _ = ours(name)
    assert tokenizer.get_vocab_size(with_added_tokens=True) == count
    for token, place in special.items():
        tokenizer.encode_special_tokens = False
        assert tokenizer.encode(f"a{token}b", add_special_tokens=False).ids[1] == place
        tokenizer.encode_special_tokens = True  # Encode special tokens' names as ordinary text.
        assert place not in tokenizer.encode(f"a{token}b", add_special_tokens=False).ids
    tokenizer.encode_special_tokens = False
    assert [tokenizer.id_to_token(place) for place in special.values()] == list(special)


def test_qwens_ids_without_a_token():
    """The converter added padding tokens for embedding rows without a token. No text may be encoded to a
    padding token.
    """
    tokenizer, _ = ours("qwen2")
    assert tokenizer.id_to_token(151_646) is None
    ids = tokenizer.encode("[PAD151646]", add_special_tokens=False).ids
    assert len(ids) > 3 and tokenizer.decode(ids) == "[PAD151646]"
