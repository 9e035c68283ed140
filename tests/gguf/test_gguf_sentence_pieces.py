"""Tests tokenizers for SentencePiece vocabularies in GGUF files. The reference is a direct implementation: it
repeatedly merges the two neighbours whose joined token has the highest score.
"""

import itertools
import random

import pytest

from mmengine.checkpoint.gguf.model import GGUFModel
from mmengine.errors import ModelError
from mmengine.processing.chat.tokens import ChatTokenizer
from tests.gguf.writing import ARRAY, BOOL, FLOAT32, INT32, STRING, UINT32, model, weights, write

SPACE = "\u2581"
LETTERS = "abcd"


def vocabulary(seed: int, **more):
    """Return the metadata of a random vocabulary, its tokens, and the scores of its normal tokens."""
    chance = random.Random(seed)
    words = ["".join(each) for n in (2, 3, 4) for each in itertools.product(LETTERS + SPACE, repeat=n)]
    chosen = chance.sample(words, 120)
    tokens = ["<pad>", "<eos>", "<bos>", "<unk>", *(f"<0x{byte:02X}>" for byte in range(256))]
    types = [3, 3, 3, 2, *[6] * 256]
    normal = [*chosen, *LETTERS, SPACE]
    tokens, types = [*tokens, *normal, "\n\n", "  ", "<start>"], [*types, *[1] * len(normal), 4, 4, 4]
    scores = {token: -float(place) for place, token in enumerate(normal)}
    keys = {
        "model": (STRING, "llama"),
        "pre": (STRING, "default"),
        "tokens": (ARRAY, (STRING, tokens)),
        "token_type": (ARRAY, (INT32, types)),
        "scores": (ARRAY, (FLOAT32, [scores.get(token, 0.0) for token in tokens])),
        "bos_token_id": (UINT32, 2),
        "eos_token_id": (UINT32, 1),
        "add_space_prefix": (BOOL, False),
    } | more
    return [(f"tokenizer.ggml.{name}", *value) for name, value in keys.items()], tokens, scores


def merged(text: str, scores: dict[str, float]) -> list[str]:
    """Return the reference's tokens for a text without special tokens."""
    pieces = list(text.replace(" ", SPACE))
    while True:
        pairs = [
            (-scores[left + right], place)
            for place, (left, right) in enumerate(itertools.pairwise(pieces))
            if left + right in scores
        ]
        if not pairs:
            return pieces
        _, place = min(pairs)
        pieces[place : place + 2] = [pieces[place] + pieces[place + 1]]


def expected(text: str, tokens: list[str], scores: dict[str, float]) -> list[int]:
    found = []
    for piece in merged(text, scores):
        if piece in tokens:
            found.append(tokens.index(piece))
        else:
            found += [tokens.index(f"<0x{byte:02X}>") for byte in piece.encode()]
    return found


def opened(path, words):
    path.write_bytes(write(model("llama") + words, weights("F16")).data)
    return path


@pytest.mark.parametrize("seed", range(4))
def test_texts_become_the_tokens_with_the_highest_scores(tmp_path, seed):
    words, tokens, scores = vocabulary(seed)
    tokenizer = ChatTokenizer.of_folder(opened(tmp_path / "model.gguf", words))
    chance = random.Random(seed)
    for _ in range(200):
        pieces = (chance.choice(LETTERS + " \u00e9\u4e2d") for _ in range(chance.randrange(1, 40)))
        text = "".join(pieces).replace("  ", " ")
        if "  " in text:
            continue  # The next test covers added tokens.
        found = tokenizer.encode(text)
        assert found == expected(text, tokens, scores)
        assert tokenizer.decode(found) == text


def test_added_tokens_are_found_before_merging(tmp_path):
    words, tokens, scores = vocabulary(5)
    tokenizer = ChatTokenizer.of_folder(opened(tmp_path / "model.gguf", words))
    for text in ("ab\n\ncd", "a  b", "x<start>abca"):
        left, mark, right = next(text.partition(mark) for mark in ("\n\n", "  ", "<start>") if mark in text)
        wanted = [*expected(left, tokens, scores), tokens.index(mark), *expected(right, tokens, scores)]
        assert tokenizer.encode(text) == wanted
        assert tokenizer.decode(wanted) == text
    assert tokenizer.text_prefix == (2,)  # BOS, which these models add by default.
    assert tokenizer.encode("<eos>") != [1]


def test_a_leading_space_is_added_and_removed_again(tmp_path):
    words, tokens, scores = vocabulary(6, add_space_prefix=(BOOL, True), add_bos_token=(BOOL, False))
    tokenizer = ChatTokenizer.of_folder(opened(tmp_path / "model.gguf", words))
    for text in ("ab", "cab abd", " d"):
        found = tokenizer.encode(text)
        assert found == expected(f" {text}", tokens, scores)
        assert tokenizer.decode(found) == text
    assert tokenizer.text_prefix == ()


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("scores", (ARRAY, (FLOAT32, [0.0])), "tokens but 1 scores"),
        ("scores", (STRING, "none"), "tokenizer.ggml.scores is missing or not an array"),
        ("model", (STRING, "t5"), "tokenizer.ggml.model is 't5'; supported are gpt2 .* and llama"),
    ],
)
def test_wrong_vocabularies_are_refused(tmp_path, name, value, said):
    words, _, _ = vocabulary(0, **{name: value})
    with pytest.raises(ModelError, match=said):
        GGUFModel(opened(tmp_path / "model.gguf", words)).file("tokenizer.json")
