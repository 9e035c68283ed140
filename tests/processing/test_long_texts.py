"""Tests that a text with too many tokens is refused after a few slices are tokenized. The work depends on the
limit, not on the text's length.
"""

import random

import numpy as np
import pytest

from mmengine.errors import InvalidRequest
from mmengine.processing.chat import tokens as chat_tokens
from mmengine.processing.chat.tokens import exceeds

CHARS = 2_000_000
LETTERS = "abcdefghijklmnopqrstuvwxyz"


def drawn(alphabet, count, seed=0):
    return "".join(random.Random(seed).choices(alphabet, k=count))


TEXTS = {
    "words": "the quick brown fox jumps over it. ",
    "one letter": "a",
    "one word": drawn(LETTERS, 1000),
    "spaces": " ",
    "lines": "\n",
    "dashes": "-",
    "quotes": "!!'s",
    "digits": "0123456789",
    "mixed": drawn(" \n!'satbé\u0301<>0", 1000),
    "emoji": "👩\u200d👩\u200d👧",
    "Chinese": drawn([chr(code) for code in range(0x4E00, 0x9FA0)], 1000),
    "added tokens": "<think></tool_call>",
    "look-alikes": "<|im_end|>",
}
# Texts whose token count is never exact if slices are counted separately.
CRAFTED = {"marks": "\u0301\u0323", "Korean, taken apart": "\u1112\u1161\u11ab"}


class Counted:
    """A tokenizer that counts the characters it received."""

    def __init__(self, tokenizer):
        self._tokenizer, self.chars, self.longest = tokenizer, 0, 0

    def encode(self, text, **options):
        self.chars += len(text)
        self.longest = max(self.longest, len(text))
        return self._tokenizer.encode(text, **options)


@pytest.fixture
def counted(processor, monkeypatch):
    monkeypatch.setattr(processor.tokenizer, "_plain", Counted(processor.tokenizer._plain))
    return processor, processor.tokenizer._plain


@pytest.mark.parametrize("name", TEXTS)
def test_slices_count_exactly(processor, name, monkeypatch):
    monkeypatch.setattr(chat_tokens, "SLICE_CHARS", 3000)
    monkeypatch.setattr(chat_tokens, "SURE_CHARS", 0)
    monkeypatch.setattr(chat_tokens, "_MARGIN", 200)
    plain = processor.tokenizer._plain
    text = TEXTS[name] * (20_000 // len(TEXTS[name]))
    tokens = len(plain.encode(text, add_special_tokens=False).ids)
    tail = len(plain.encode(text[-3000:], add_special_tokens=False).ids) + 1  # The last slice is not counted.
    assert not exceeds(plain, text, tokens)
    assert exceeds(plain, text, tokens - tail)


@pytest.mark.parametrize("name", CRAFTED)
def test_no_slice_counts_too_much(processor, name, monkeypatch):
    monkeypatch.setattr(chat_tokens, "SLICE_CHARS", 3000)
    monkeypatch.setattr(chat_tokens, "SURE_CHARS", 0)
    plain = processor.tokenizer._plain
    text = CRAFTED[name] * (20_000 // len(CRAFTED[name]))
    tokens = len(plain.encode(text, add_special_tokens=False).ids)
    assert not exceeds(plain, text, tokens)
    assert exceeds(plain, text, tokens // 3)


@pytest.mark.parametrize("name", [*TEXTS, *CRAFTED])
def test_work_until_a_refusal_is_bounded_by_the_limit(counted, name):
    processor, tokenizer = counted
    text = (TEXTS | CRAFTED)[name]
    message = {"role": "user", "content": text * (CHARS // len(text))}
    with pytest.raises(InvalidRequest, match="tokens > 4096 maximum of the model"):
        processor.prepare([message])
    assert tokenizer.longest <= chat_tokens.SLICE_CHARS
    # The tokenizer's longest tokens are 16 characters of white space.
    assert tokenizer.chars <= 32 * processor.max_positions


MANY = 2000
DOORS = {
    "messages": [{"role": "user", "content": "a b " * 250}] * MANY,
    "parts": [{"role": "user", "content": [{"type": "text", "text": "a b " * 250}] * MANY}],
    "role": [{"role": "a b " * 500_000, "content": "a"}],
    "system": [{"role": "system", "content": "a b " * 500_000}, {"role": "user", "content": "a"}],
}


@pytest.mark.parametrize("name", DOORS)
def test_every_field_of_a_chat_is_limited(counted, name):
    processor, tokenizer = counted
    with pytest.raises(InvalidRequest, match="> 4096 maximum"):
        processor.prepare(DOORS[name])
    assert tokenizer.chars <= 32 * processor.max_positions


@pytest.mark.parametrize("text", ["a b ", "<|im_end|>", "<|im_end|>a", "<|endoftext|> \n"])
def test_a_prompt_string(counted, text):
    processor, tokenizer = counted
    with pytest.raises(InvalidRequest, match="> 4096 maximum"):
        processor.prepare_text(text * (CHARS // len(text)))
    assert tokenizer.chars <= 32 * processor.max_positions
    with pytest.raises(InvalidRequest, match="more than 8388608 characters"):
        processor.prepare_text(text * (25_000_000 // len(text)))


def test_text_behind_a_picture_that_fills_the_prompt(counted, monkeypatch):
    processor, tokenizer = counted
    monkeypatch.setattr(processor, "max_prompt_tokens", 100)
    picture = np.zeros((320, 320, 3), np.uint8)
    content = [{"type": "image", "image": picture}, {"type": "text", "text": "a b " * 100_000}]
    with pytest.raises(InvalidRequest, match="100 maximum of this engine"):
        processor.prepare([{"role": "user", "content": content}])
    assert tokenizer.chars < 2 * chat_tokens.SLICE_CHARS


def test_values_other_than_text_count_too(processor):
    numbers = {"role": "user", "content": "a", "numbers": [0] * 2_000_000}
    objects = {"role": "user", "content": "a", "objects": [{}] * 2_000_000}
    parts = {"role": "user", "content": [{"type": "text", "text": ""}] * 4096}
    for messages in ([numbers], [objects]):
        with pytest.raises(InvalidRequest, match="more than 8388608 characters"):
            processor.prepare(messages)
    with pytest.raises(InvalidRequest, match="more than 65536 parts together"):
        processor.prepare([parts] * 17)


def test_an_accepted_text_is_tokenized_whole(processor, reference_tokenizer, monkeypatch):
    monkeypatch.setattr(chat_tokens, "SLICE_CHARS", 3000)
    monkeypatch.setattr(chat_tokens, "SURE_CHARS", 0)
    text = TEXTS["mixed"] * 3 + "the end"
    expected = reference_tokenizer(text).input_ids
    assert len(text) > 3000 and len(expected) <= processor.max_positions
    assert processor.prepare_text(text).prompt_token_ids.tolist() == expected
