"""Tests `text_offset` in completions: each token's position in the text, with and without streaming."""

import json
import unicodedata
from types import SimpleNamespace

import pytest

from mmengine.config import EngineConfig
from mmengine.serve.async_engine.async_engine import AsyncEngine
from mmengine.serve.text.choice_deltas import ChoiceDeltas, Delta
from mmengine.serve.text.reasoning import ReasoningTokens
from mmengine.server.chat.text_offsets import TextOffsets
from tests.server.running import served


def nfd(text):
    return unicodedata.normalize("NFD", text)


PROMPTS = {
    "plain": "The red triangle.",
    "special": "<|im_start|>user\nA star<|im_end|>\n<|im_start|>assistant\n",
    "special inside": "a<|im_end|>b <|im_end|>",
    "decomposed": nfd("Café déjà naïve."),
    "jamo": nfd("한국어 문장") + " a",
    "stacked marks": nfd("Ångström") + " x\u0302\u0323 y",
    "singletons": "\u2126 ohm, \u212b, \u212a.",
    "emoji": "a 👩‍👩‍👧 b 🏳️‍🌈 c",
    "all": "<|im_start|>" + nfd("é 한") + " 👧\u2126<|im_end|>z",
}


@pytest.fixture(scope="module")
def server():
    with served(AsyncEngine(config=EngineConfig()), names=("m",)) as one:
        yield one


def pieces(choice):
    """Return each token with the text between its offset and the next token's offset."""
    said = choice["logprobs"]
    ends = [*said["text_offset"], len(choice["text"])]
    assert ends == sorted(ends) and ends[0] == 0
    found = [choice["text"][a:b] for a, b in zip(ends, ends[1:], strict=False)]
    return list(zip(said["tokens"], found, strict=True))


def check(choice, prompt):
    assert choice["text"].startswith(prompt)
    for token, piece in pieces(choice):
        if "\ufffd" in token or token == piece:
            continue
        # If two tokens share a letter and its marks, all of this text may belong to the second token. The
        # end-of-sequence token has no text.
        assert token.startswith(unicodedata.normalize("NFC", piece)), (token, piece)


def streamed(server, asked):
    raw = server.call("/v1/completions", {**asked, "stream": True})[2]
    events = [json.loads(each.removeprefix("data: ")) for each in raw.split("\n\n") if "data: {" in each]
    return [choice for event in events for choice in event["choices"]]


def test_offsets_are_those_of_the_returned_text_streamed_or_whole(server):
    prompts = list(PROMPTS.values())
    asked = {"prompt": prompts, "echo": True, "logprobs": 1, "max_tokens": 4, "n": 2, "seed": 3}
    asked["temperature"] = 1.0
    status, _, body = server.call("/v1/completions", asked)
    assert status == 200, body
    parts = streamed(server, asked)
    for choice in body["choices"]:
        check(choice, prompts[choice["index"] // 2])
        mine = [part for part in parts if part["index"] == choice["index"]]
        assert "".join(part["text"] for part in mine) == choice["text"]
        found = [offset for part in mine if part["logprobs"] for offset in part["logprobs"]["text_offset"]]
        assert found == choice["logprobs"]["text_offset"]


def test_prompts_of_token_ids_hide_their_special_tokens(server):
    tokens = server.call("/tokenize", {"prompt": PROMPTS["special"], "add_special_tokens": False})[2][
        "tokens"
    ]
    asked = {"prompt": [tokens], "echo": True, "logprobs": 0, "max_tokens": 2}
    (choice,) = server.call("/v1/completions", asked)[2]["choices"]
    named = [token for token, piece in pieces(choice) if token.startswith("<|im_") and piece]
    assert choice["text"].startswith("user\nA star\nassistant\n") and not named
    assert ("user", "user") in pieces(choice) and (" star", " star") in pieces(choice)


@pytest.mark.parametrize("stop", [". ", "ed red", "d"])
def test_tokens_of_a_stop_string_begin_at_the_end_of_the_text(server, stop):
    asked = {"prompt": "The red triangle.", "logprobs": 0, "max_tokens": 12, "temperature": 0, "stop": [stop]}
    (choice,) = server.call("/v1/completions", asked)[2]["choices"]
    assert all(0 <= offset <= len(choice["text"]) for offset in choice["logprobs"]["text_offset"])
    parts = [part for part in streamed(server, asked) if part["logprobs"]]
    assert [at for part in parts for at in part["logprobs"]["text_offset"]] == choice["logprobs"][
        "text_offset"
    ]


def byte_texts(names):
    """Return token texts for a tokenizer with a token for each byte and with special tokens from id 256."""

    def of(token):
        data = bytes([token]) if token < 256 else names[token].encode()
        return data.decode(errors="replace"), data

    return SimpleNamespace(special_ids=frozenset(names), of=of)


def test_a_prompt_may_begin_with_a_token_that_is_not_in_its_text():
    texts = byte_texts({256: "<s>", 257: "<x>"})
    tokens = [256, *b"a", 257, *b"b"]
    assert TextOffsets(texts, "a<x>b").of_prompt(tokens) == [0, 0, 1, 4]
    assert TextOffsets(texts, "<s>a<x>b").of_prompt(tokens) == [0, 3, 4, 7]
    assert TextOffsets(texts, "ab").of_prompt(tokens) == [0, 0, 1, 1]


def test_offsets_of_another_text_stay_within_it():
    """A tokenizer may change a text in other ways than Unicode normalization."""
    texts = byte_texts({})
    assert TextOffsets(texts, "abc").of_prompt(list(b" ab  c")) == [0, 1, 2, 3, 3, 3]


def test_markers_of_reasoning_are_not_in_the_text():
    """The markers need not be special tokens."""
    tokenizer = SimpleNamespace(
        decode=lambda ids, skip_special_tokens=True: bytes(ids).decode(errors="replace"), text_bytes=None
    )
    sampling = SimpleNamespace(stop=(), min_stop_tokens=0)
    deltas = ChoiceDeltas(tokenizer, sampling, ReasoningTokens(False, (ord("<"),), (ord(">"),)))
    answer = b"<why>so"
    found = deltas.push(list(answer), [((token, -1.0),) for token in answer])
    found = [*found, deltas.finish()]
    assert "".join(each.reasoning + each.content for each in found) == "whyso"
    offsets, places = TextOffsets(byte_texts({}), ""), []
    for each in found:
        places += offsets.of([entry[0][0] for entry in each.logprobs], each.markers)
    assert places == [0, 0, 1, 2, 3, 3, 4]
    assert Delta().markers == ()
