"""Tests that each grammar engine follows the Backend contract. The vocabulary has single bytes and some
longer tokens.
"""

import itertools
import re

import numpy as np
import pytest

from mmengine.errors import InvalidRequest
from mmengine.request import GrammarRequest, Request, SamplingParams
from mmengine.structured_output.engines.backends import GRAMMAR_BACKENDS
from mmengine.structured_output.json_schema.vocabulary.refusal import SchemaRefused
from mmengine.structured_output.request.spec import grammar_of
from mmengine.structured_output.rows.rows import RowMatchers

PAIRS = [b'{"', b'":', b'"}', b"ab", b"00", b"\xc3\xa9", b"tr", b"ue"]
TOKENS = [bytes([byte]) for byte in range(256)] + PAIRS + [b"<|end|>", b"<|end too|>", b"<|image|>", b""]
END, END_TOO, IMAGE = 264, 265, 266
VOCAB = 300  # Larger than the tokenizer's vocabulary, and not a multiple of 32.


def encode(text):
    """Return the token ids for `text`, with two-byte tokens wherever PAIRS has them."""
    rest, found = text.encode(), []
    while rest:
        best = rest[:2] if rest[:2] in PAIRS else rest[:1]
        found.append(TOKENS.index(best))
        rest = rest[len(best) :]
    return found


def make(name, *more):
    if name == "xgrammar":
        pytest.importorskip(name)
    special = frozenset({END, END_TOO, IMAGE})
    return GRAMMAR_BACKENDS.load(name)(lambda: TOKENS, encode, special, (END, END_TOO), VOCAB, *more)


@pytest.fixture(scope="module", params=[*GRAMMAR_BACKENDS.names(), "llguidance on three threads"])
def backend(request):
    name, *more = request.param.split()
    return make(name, *([3] if more else []))


@pytest.fixture(scope="module")
def llguidance():
    return make("llguidance")


def allowed(backend, matcher):
    bits = np.full((1, -(-VOCAB // 32)), 0xFFFFFFFF, np.uint32)
    backend.fill([matcher], bits)
    return set(np.flatnonzero(np.unpackbits(bits.view(np.uint8), bitorder="little")).tolist())


@pytest.mark.parametrize(
    ("schema", "pointer"),
    [
        (
            {"patternProperties": {"\\p{L}a+": {"type": "null"}, "b": {"type": "string"}}},
            "#/patternProperties",
        ),
        (
            {
                "properties": {
                    "b/c": {
                        "patternProperties": {"^\\p{L}{2}$": {"type": "null"}, "^a{1,3}$": False},
                        "additionalProperties": False,
                    }
                }
            },
            "#/properties/b~1c/patternProperties",
        ),
        (
            {
                "$defs": {"d": {"type": "object", "patternProperties": {"": True, "\\p{L}": False}}},
                "$ref": "#/$defs/d",
            },
            "#/$defs/d/patternProperties",
        ),
    ],
)
def test_llguidance_refuses_overlapping_key_patterns_with_their_place(llguidance, schema, pointer):
    text = grammar_of({"type": "json_schema", "json_schema": {"schema": schema}})
    with pytest.raises(SchemaRefused, match="are not disjoint; let no key match both") as caught:
        llguidance.compile(text)
    assert (caught.value.keyword, caught.value.pointer) == ("patternProperties", pointer)


def prefixes_of(words):
    return {word[:length] for word in words for length in range(len(word) + 1)}


@pytest.mark.parametrize(
    ("grammar", "words"),
    [
        ({"choice": ["ab", "abc", "", "00é"]}, ["ab", "abc", "", "00é"]),
        ({"choice": ['say "x"', "back\\slash", "line\nfeed", "/re/", "\u2028😀\u0000"]}, None),
        ({"regex": "(ab|00){1,2}"}, ["ab", "00", "abab", "ab00", "00ab", "0000"]),
        ({"regex": "(ab)?(é|00(é|00)?)"}, [a + b for a in ("", "ab") for b in ("é", "00", "00é", "0000")]),
    ],
)
def test_a_token_is_allowed_if_its_bytes_can_be_completed(backend, grammar, words):
    """The masks allow exactly the texts that the grammar accepts. Where the next bytes are forced, llguidance
    may allow only the tokens that the tokenizer would choose.
    """
    words = words or grammar["choice"]
    compiled = backend.compile(grammar_of(grammar=grammar))
    words = {word.encode() for word in words}
    starts = prefixes_of(words)
    seen, todo, ends = {b""}, [((), b"")], set()
    while todo:
        tokens, text = todo.pop()
        matcher = compiled.matcher()
        assert not tokens or matcher.consume_tokens(list(tokens))
        can = allowed(backend, matcher)
        assert {END, END_TOO} & can == ({END, END_TOO} if text in words else set())
        ends |= {text} & words
        wanted = {token for token, each in enumerate(TOKENS[:END]) if each and text + each in starts}
        can -= {END, END_TOO}
        assert can == wanted or (can and can < wanted)
        for token in can:
            if text + TOKENS[token] not in seen:
                seen.add(text + TOKENS[token])
                todo.append(((*tokens, token), text + TOKENS[token]))
    assert ends == words


def test_json_with_any_tokens(backend):
    schema = {
        "type": "object",
        "properties": {"é": {"type": "boolean"}},
        "required": ["é"],
        "additionalProperties": False,
    }
    compiled = backend.compile(grammar_of({"type": "json_schema", "json_schema": {"schema": schema}}))
    matcher = compiled.matcher()
    for token in (
        TOKENS.index(b'{"'),
        TOKENS.index(b"\xc3\xa9"),
        TOKENS.index(b'":'),
        *b"tr",
        TOKENS.index(b"ue"),
    ):
        assert token in allowed(backend, matcher)
        assert not matcher.is_stopped() and not matcher.is_accepting()
        backend.advance([matcher], [token])
    assert allowed(backend, matcher) & set(b"}") and END not in allowed(backend, matcher)
    before = matcher.deep_copy()
    backend.advance([matcher], [ord("}")])
    assert matcher.is_stopped() and matcher.is_accepting() and not matcher.is_error()
    assert not before.is_accepting() and before.consume_token(ord("}")) and before.is_accepting()
    assert not before.consume_token(ord("}")) and before.is_error() and not before.is_accepting()


def test_a_text_never_contains_special_or_missing_tokens(backend):
    matcher = backend.compile(grammar_of(grammar={"regex": r"(?s:.*)"})).matcher()
    can = allowed(backend, matcher)
    assert IMAGE not in can and max(can) == END_TOO
    assert set(range(128)) <= can


@pytest.mark.parametrize(
    ("grammar", "says"),
    [
        ({"regex": "(a"}, "unclosed group"),
        ({"lark": "start: nothing"}, 'unknown name: "nothing"'),
        ({"lark": "begin: /a/"}, "start"),
        ({"lark": 'start: "a'}, ""),
    ],
)
def test_llguidance_refuses_invalid_grammars(llguidance, grammar, says):
    with pytest.raises(
        InvalidRequest, match="^the grammar cannot be (used|read): .*" + re.escape(says)
    ) as refusal:
        llguidance.compile(grammar_of(grammar=grammar))
    assert "\n" not in str(refusal.value)


def request(name, prompt=(1, 2)):
    return Request(
        name, np.array(prompt, np.int32), SamplingParams(), grammar=GrammarRequest("regex", "held elsewhere")
    )


def test_rows_follow_their_grammars(backend):
    """The state of each row's grammar follows the row's tokens, even after a preemption."""
    compiled = {
        "count": backend.compile(grammar_of(grammar={"regex": "[0-9]{3}"})),
        "word": backend.compile(grammar_of(grammar={"choice": ["ab", "b"]})),
    }
    rows = RowMatchers(backend, compiled.get, VOCAB)
    rows.admit(5, request("count"), np.array([1, 2], np.int32))
    rows.admit(2, request("word"), np.array([1, 2], np.int32))
    rows.admit(7, request("nobody's"), np.array([1, 2], np.int32))
    bits, errors = rows.masks([2, 7, 5])
    assert errors == {1: "its grammar is not compiled on this worker"}
    assert sets_of(bits) == [
        {ord("a"), ord("b"), TOKENS.index(b"ab")},
        set(),
        {*b"0123456789", TOKENS.index(b"00")},
    ]
    assert rows.advance([2, 5], [[ord("b")], [ord("7")]]) == ({0: 1}, {})
    # Row 2's request was preempted, and another preempted request resumes in row 2.
    rows.admit(2, request("count"), np.array([1, 2, ord("1"), ord("2")], np.int32))
    assert rows.advance([2], [[ord("3")]]) == ({0: 1}, {})
    complete, errors = rows.advance([5], [[ord("x")]])
    assert complete == {} and errors[0].startswith("its grammar cannot continue: ")
    assert rows.masks([5])[1].keys() == {0}


def sets_of(bits):
    lines = np.unpackbits(bits.view(np.uint8), axis=1, bitorder="little")[:, :VOCAB]
    return [set(np.flatnonzero(line).tolist()) for line in lines]


def test_masks_after_drafts(backend):
    compiled = {"word": backend.compile(grammar_of(grammar={"regex": "(ab|cd)e{2}"}))}
    rows = RowMatchers(backend, compiled.get, VOCAB)
    for row in (0, 1, 2):
        rows.admit(row, request("word"), np.array([1, 2], np.int32))
    drafts = [[ord("c"), ord("d"), ord("e")], [], [ord("a"), ord("c"), ord("e")]]
    bits, errors = rows.masks([0, 1, 2], drafts)
    assert errors == {} and len(bits) == 4 + 1 + 4
    behind = sets_of(bits)
    assert behind[:4] == [sets_of(rows.masks([1])[0])[0], {ord("d")}, {ord("e")}, {ord("e")}]
    assert behind[6] == {ord("b")} and behind[7] == behind[8] == set(), (
        "no mask after a draft that is not allowed"
    )
    assert sets_of(rows.masks([0])[0]) == behind[:1], "masks after drafts do not advance the row"
    assert rows.advance([0], [[ord("c"), ord("d"), ord("e"), ord("e")]]) == ({0: 4}, {})
    complete, errors = rows.advance([2], [[ord("a"), ord("c")]])
    assert complete == {} and errors == {0: "its grammar does not allow the generated tokens"}


def test_a_grammar_begins_after_the_reasoning(backend):
    """The grammar may begin in the middle of a row's drafts. Before the grammar begins, all tokens except end
    tokens are allowed.
    """
    compiled = backend.compile(GrammarRequest("regex", "[0-9]{2}", (ord("<"), ord("/"))))
    rows = RowMatchers(backend, lambda _: compiled, VOCAB)
    rows.admit(0, request("r"), np.array([1, 2, ord("x"), ord("<")], np.int32))
    digits = {*b"0123456789", TOKENS.index(b"00")}
    anything = set(range(VOCAB)) - {END, END_TOO}
    drafts = [[ord("<"), ord("/"), ord("5"), ord("6")]]
    assert sets_of(rows.masks([0], drafts)[0])[:4] == [anything, anything, digits, {*b"0123456789"}]
    assert sets_of(rows.masks([0], [[ord("/")]])[0]) == [anything, digits]
    assert rows.advance([0], [[ord("y"), ord("<")]]) == ({}, {})
    assert rows.said(0) is None, "the grammar has not begun"
    assert rows.advance([0], [[ord("/"), ord("5"), ord("6")]]) == ({0: 3}, {})
    assert rows.said(0) == [ord("5"), ord("6")]
    # The row was preempted and is admitted again.
    rows.admit(0, request("r"), np.array([1, 2, ord("<"), ord("/"), ord("5")], np.int32))
    assert sets_of(rows.masks([0])[0]) == [{*b"0123456789"}]
    assert rows.advance([0], [[ord("7")]]) == ({0: 1}, {})


def test_reasoning_does_not_end_early_with_an_empty_form(backend):
    """During reasoning, an end token is not consumed, although the grammar allows an empty text."""
    compiled = backend.compile(GrammarRequest("choice", '["","a"]', (ord("<"),)))
    rows = RowMatchers(backend, lambda _: compiled, VOCAB)
    for row, form in enumerate(["one by one", "in a run"]):
        rows.admit(row, request(form), np.array([1, 2, ord("x")], np.int32))
    assert rows.consume_run(0, [END]) == (0, False) and rows.consume_run(0, [ord("y")]) == (1, False)
    assert rows.consume_run(0, [ord("<")]) == (1, False) and rows.said(0) == []
    assert rows.advance([1], [[ord("y"), ord("<")]]) == ({}, {})
    assert sets_of(rows.masks([0, 1])[0]) == [{ord("a"), END, END_TOO}] * 2
    assert rows.consume_run(0, [ord("a")]) == (1, True)
    assert rows.advance([1], [[ord("a")]]) == ({0: 1}, {})


def test_many_rows_at_once_equal_single_rows(backend):
    compiled = backend.compile(grammar_of({"type": "json_object", "bounds": {"string": 0}}))
    texts = [b'{"', b'{"ab', b'{"ab":', b'{"ab":tr', b'{"ab":[0', b""]
    matchers = [compiled.matcher() for _ in range(4 * len(texts))]
    for matcher, text in zip(matchers, itertools.cycle(texts)):
        assert not text or matcher.consume_tokens(list(text))
    together = np.zeros((len(matchers), -(-VOCAB // 32)), np.uint32)
    backend.fill(matchers, together)
    for matcher, line in zip(matchers, together, strict=True):
        alone = np.zeros((1, len(line)), np.uint32)
        backend.fill([matcher], alone)
        assert np.array_equal(alone[0], line) and line.any()


def test_validation_does_not_change_the_state(backend):
    compiled = backend.compile(grammar_of(grammar={"regex": "ab[0-9]{2}x?"}))
    matcher = compiled.matcher()
    ab, zeros = TOKENS.index(b"ab"), TOKENS.index(b"00")
    before = allowed(backend, matcher)
    assert matcher.validate_tokens([ab, zeros, ord("x"), ord("x")]) == 3
    assert matcher.validate_tokens([ord("b")]) == 0
    assert allowed(backend, matcher) == before
    assert matcher.try_consume_tokens([ab, zeros, ab]) == 2
    assert not matcher.is_stopped() and not matcher.is_error()
    copy = matcher.deep_copy()
    assert copy.consume_tokens([ord("x")]) and not matcher.is_stopped()
    assert not matcher.consume_tokens([ord("y")]) and matcher.is_error() and matcher.is_stopped()
    assert matcher.get_error()


def test_forced_tokens_use_the_tokenizers_spelling(backend):
    """The forced tokens are a prefix of the tokenizer's encoding. The encoding's last tokens may be missing,
    because later text could merge with these tokens.
    """
    matcher = backend.compile(grammar_of(grammar={"choice": ["abab00é!", "abab00é?"]})).matcher()
    forced = matcher.compute_ff_tokens()
    assert forced in (encode("abab00é"), encode("abab00é")[:-1], encode("abab00")[:-1])
    assert matcher.validate_tokens(forced) == len(forced)
    assert matcher.consume_tokens(encode("abab00é")) and matcher.compute_ff_tokens() == []


def test_an_end_of_sequence_ends_a_text(backend):
    matcher = backend.compile(grammar_of(grammar={"regex": "a+"})).matcher()
    assert matcher.consume_tokens([ord("a")]) and not matcher.is_stopped()
    assert matcher.consume_tokens([END_TOO]) and matcher.is_stopped() and not matcher.is_error()


def test_allows_equals_the_mask(backend):
    compiled = backend.compile(grammar_of(grammar={"choice": ["ab", "abc", "00é!"]}))
    for text in (b"", b"a", b"ab", b"00", b"00\xc3"):
        matcher = compiled.matcher()
        assert matcher.try_consume_tokens(list(text)) == len(text)
        can = allowed(backend, matcher)
        assert {token for token in range(VOCAB) if backend.allows(matcher, token)} == can
        for token in set(range(VOCAB)) - {END, END_TOO}:
            matcher = compiled.matcher()
            assert matcher.try_consume_tokens(list(text)) == len(text)
            last = text[-1] if text else -1
            assert backend.take(matcher, token, last) == (token in can) and not matcher.is_error()
