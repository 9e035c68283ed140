"""Tests that incremental decoding of byte tokens gives the same text as decoding the whole answer."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mmengine.models.loader import resolve_folder
from mmengine.models.registry import plugin_for
from mmengine.serve.text.detokenizer import ByteDetokenizer, Detokenizer

FOLDER = resolve_folder(None)
TOKENIZER = plugin_for(FOLDER).load_processor(FOLDER).tokenizer


class Damaged(type(TOKENIZER)):
    """A tokenizer with an added token, "é", which the decoder reads as a byte."""

    def __init__(self, data, origin, placeholders=()):
        super().__init__(data, origin, placeholders)
        self._full.add_tokens(["é"])
        token = self._full.token_to_id("é")
        self._added[token], self.vocab_size = "é", max(self.vocab_size, token + 1)


@pytest.fixture(scope="module")
def pieces():
    found = TOKENIZER.text_bytes
    assert found is not None and len(found) == TOKENIZER.vocab_size
    return found


@given(
    st.lists(st.integers(0, TOKENIZER.vocab_size + 5), max_size=60),
    st.lists(st.integers(0, 60), max_size=6),
)
def test_any_tokens_in_any_pieces_give_the_decoded_text(pieces, tokens, cuts):
    places = sorted({0, len(tokens), *(min(cut, len(tokens)) for cut in cuts)})
    chunks = [tokens[a:b] for a, b in zip(places, places[1:], strict=False)]
    for stream in (ByteDetokenizer(pieces), Detokenizer(TOKENIZER)):
        text = "".join(stream.push(chunk) for chunk in chunks) + stream.finish()
        assert text == TOKENIZER.decode(tokens)


@given(st.text(max_size=60))
def test_a_character_comes_with_its_last_byte(pieces, text):
    stream, said = ByteDetokenizer(pieces), b""
    shown = ""
    for token in TOKENIZER.encode(text):
        shown += stream.push([token])
        said += pieces[token]
        assert shown == said.decode(errors="ignore")


def test_a_tokenizer_with_an_added_byte_token_is_not_a_byte_tokenizer():
    damaged = Damaged.of_folder(FOLDER)
    token = damaged._full.token_to_id("é")
    if damaged.decode([token]) == "é":
        pytest.skip("this decoder returns the added token unchanged")
    assert damaged.text_bytes is None
