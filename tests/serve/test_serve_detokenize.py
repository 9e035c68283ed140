# Tests incremental detokenization: the pieces join to the whole text, and contain no stop string.

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from mmengine.request import Request, SamplingParams
from mmengine.serve.text.detokenizer import REPLACEMENT, Detokenizer, Stops, TextStream
from mmengine.serve.text.stop_strings import StopStrings

CHECKPOINT = Path(__file__).parents[2] / "plugins" / "mmengine_shapes" / "checkpoint"


class LibraryTokenizer:
    """The included checkpoint's tokenizer with the interface `Tokenizer`."""

    def __init__(self):
        self._inner = Tokenizer.from_file(str(CHECKPOINT / "tokenizer.json"))
        self.vocab_size = self._inner.get_vocab_size()
        self.num_decodes = 0
        self.longest = 0

    def encode(self, text):
        return self._inner.encode(text, add_special_tokens=False).ids

    def decode(self, token_ids, *, skip_special_tokens=True):
        self.num_decodes += 1
        self.longest = max(self.longest, len(token_ids))
        return self._inner.decode(list(token_ids), skip_special_tokens=skip_special_tokens)


TOKENIZER = LibraryTokenizer()
BYTES = [TOKENIZER._inner.token_to_id(text) for text in ("Ã", "â", "Ĥ", "¬", "ð", "Ł", "Ļ", "Ĥ", "a", "Ġ")]
any_ids = st.lists(
    st.one_of(
        st.integers(0, TOKENIZER.vocab_size - 1),
        st.sampled_from([token for token in BYTES if token is not None]),
    ),
    max_size=120,
)
texts = st.text(st.sampled_from("ab €é🙂\n{}"), max_size=60)


@given(any_ids, st.randoms(use_true_random=False))
@settings(max_examples=300, deadline=None)
def test_pieces_join_to_the_whole_text_however_tokens_arrive(ids, rng):
    stream, pieces, place = Detokenizer(TOKENIZER), [], 0
    while place < len(ids):
        length = rng.randint(1, 5)
        pieces.append(stream.push(ids[place : place + length]))
        place += length
    pieces.append(stream.finish())
    assert "".join(pieces) == TOKENIZER.decode(ids)


@given(texts)
@settings(max_examples=200, deadline=None)
def test_no_piece_holds_part_of_a_character(text):
    stream = Detokenizer(TOKENIZER)
    pieces = [stream.push([token]) for token in TOKENIZER.encode(text)]
    assert all(REPLACEMENT not in piece for piece in pieces)
    assert "".join(pieces) == text and stream.finish() == ""


@pytest.mark.parametrize("text", ["abc " * 2000, "\u20ac" * 2000])
def test_decoding_work_a_token_does_not_grow(text):
    tokenizer = LibraryTokenizer()
    ids = tokenizer.encode(text)
    stream = Detokenizer(tokenizer)
    for token in ids:
        stream.push([token])
    assert tokenizer.longest < 40 and tokenizer.num_decodes < 3 * len(ids)


def test_bytes_that_are_no_text_do_not_grow_the_window():
    tokenizer = LibraryTokenizer()
    stray = tokenizer._inner.token_to_id("Ĥ")  # a lone continuation byte
    stream = Detokenizer(tokenizer)
    pieces = [stream.push([stray]) for _ in range(500)]
    assert "".join(pieces) + stream.finish() == REPLACEMENT * 500
    assert tokenizer.longest < 40


@given(texts, st.lists(st.text(st.sampled_from("ab €é🙂"), min_size=1, max_size=4), min_size=1, max_size=3))
@settings(max_examples=500, deadline=None)
def test_a_stop_string_never_leaks_and_nothing_else_is_lost(text, stop):
    ids = TOKENIZER.encode(text)
    stream, shown = TextStream(TOKENIZER, stop=stop), ""
    for token in ids:
        shown += stream.push([token])
        assert not any(string in shown for string in stop)
        if stream.stopped:
            break
    shown += stream.finish()
    whole_tokens = TOKENIZER.decode(ids)
    assert whole_tokens.startswith(shown)
    assert stream.stopped == any(string in text for string in stop)
    if not stream.stopped:
        assert shown == text
    assert Stops(tuple(stop)).text(TOKENIZER, ids) == shown


@given(texts, st.text(st.sampled_from("ab €"), min_size=1, max_size=3), st.integers(0, 20))
@settings(max_examples=200, deadline=None)
def test_the_first_tokens_cannot_stop(text, stop, min_tokens):
    ids = TOKENIZER.encode(text)
    stream = TextStream(TOKENIZER, stop=(stop,), min_tokens=min_tokens)
    for count, token in enumerate(ids, 1):
        stream.push([token])
        assert not (stream.stopped and count <= min_tokens)
        if stream.stopped:
            assert TOKENIZER.decode(ids[:count]).rfind(stop) >= 0
            break


def make_request(stop=(), min_tokens=0, prompt=(1, 2, 3)):
    sampling = SamplingParams(stop=stop, min_tokens=min_tokens, seed=1)
    return Request("r", np.array(prompt, dtype=np.int32), sampling)


def feed(watcher, rows, tokens):
    return watcher.feed(np.array(rows, dtype=np.int32), np.array(tokens, dtype=np.int32))


def test_the_watcher_names_the_rows_whose_text_ended():
    watcher = StopStrings(TOKENIZER)
    ids = TOKENIZER.encode("a b} c")
    for row, request in ((0, make_request()), (5, make_request(("}",))), (2, make_request((" c",)))):
        watcher.admit(row, request, request.prompt_token_ids)
    stops = [feed(watcher, [5, 0, 2], [token] * 3) for token in ids]
    brace = next(k for k in range(len(ids)) if "}" in TOKENIZER.decode(ids[: k + 1]))
    assert stops[brace] == [0] and all(not any(s == 1 for s in found) for found in stops)
    assert stops[-1] in ([2], [0, 2])


def test_the_watcher_resumes_a_preempted_request_and_forgets_a_row_given_away():
    # The stop string "ab" is found although "a" came before the preemption. The row's next request has no
    # stop string.
    watcher = StopStrings(TOKENIZER)
    request = make_request(("ab",))
    a, b = TOKENIZER.encode("a")[0], TOKENIZER.encode("b")[0]
    watcher.admit(1, request, np.array([1, 2, 3, a], dtype=np.int32))
    assert feed(watcher, [1], [b]) == [0]
    watcher.admit(1, make_request(), np.array([1, 2, 3], dtype=np.int32))
    assert feed(watcher, [1], [a]) == [] and feed(watcher, [1], [b]) == []
