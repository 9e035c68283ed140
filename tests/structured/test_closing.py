"""Tests that completions are valid and short, and that `Closer` ends every text within its token budget."""

import json
import random

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from llguidance import LLMatcher

from mmengine.errors import InvalidRequest
from mmengine.request import GrammarRequest
from mmengine.structured_output.closing.closer import Closer
from mmengine.structured_output.closing.closings import Closings
from mmengine.structured_output.closing.hints import hints_of
from mmengine.structured_output.closing.search import Search, Vocabulary
from mmengine.structured_output.closing.shortest_text import PatternAutomaton, TextPattern
from mmengine.structured_output.engines.llguidance.backend import LLGuidance
from mmengine.structured_output.json_schema.normalization import Bounds
from mmengine.structured_output.request.spec import grammar_of
from tests.structured.accepting import END, TOKENIZER, Grammar, allowed
from tests.structured.strategies import Case, cases
from tests.structured.test_schema_random import validator

BYTES = Vocabulary([bytes([byte]) for byte in range(256)] + [b""])


def closings_of(schema_text: str) -> Closings:
    """Return the closings for a normalized schema."""
    return Closings(BYTES, hints_of(GrammarRequest("json_schema", schema_text)))


RANDOM = settings(
    max_examples=60,
    deadline=None,
    phases=[Phase.generate],
    suppress_health_check=list(HealthCheck),
    derandomize=True,
)
NODE = {
    "$ref": "#/$defs/node",
    "$defs": {
        "node": {
            "type": "object",
            "properties": {
                "value": {"type": "integer", "minimum": 100},
                "parts": {"type": "array", "items": {"$ref": "#/$defs/node"}},
                "next": {"anyOf": [{"$ref": "#/$defs/node"}, {"type": "null"}]},
            },
            "required": ["value", "parts", "next"],
        }
    },
}
LISTS = {
    "anyOf": [
        {"type": "array", "minItems": 1, "items": {"$ref": "#"}},
        {"type": "object", "properties": {"a": {"type": "string"}}, "required": ["a"]},
    ]
}
# "a" is the shorter value for kind, but requires another part. A completion that always takes "a" never ends.
LINKED = {
    "$ref": "#/$defs/part",
    "$defs": {
        "part": {
            "anyOf": [
                {
                    "properties": {"kind": {"const": "a"}, "next": {"$ref": "#/$defs/part"}},
                    "required": ["kind", "next"],
                },
                {"properties": {"kind": {"const": "leaf"}}, "required": ["kind"]},
            ],
            "type": "object",
            "additionalProperties": False,
            "properties": {"kind": {}, "next": {}},
        }
    },
}
MANY = {"type": "object", "properties": {f"key {n}": {"type": "integer"} for n in range(30)}}


def close(closings, matcher, said=b"", budget=4096):
    """Return `said` followed by its completion, or None if no completion is found within `budget`."""
    matcher, place = matcher.deep_copy(), closings.begin()
    assert not said or matcher.consume_tokens(list(said))
    for token in said:
        place = closings.advance(place, token)
    path = closings.closing(matcher, place, budget)
    if path is None:
        return None
    assert len(path) <= budget
    for token in path:
        assert not matcher.is_stopped() and token in allowed(matcher) and matcher.consume_token(token)
    assert matcher.is_accepting()
    return (said + bytes(path)).decode()


@pytest.mark.parametrize(
    ("schema", "said", "length"),
    [
        ({"type": "object"}, b"", 2),
        ({"type": "object"}, b'{"a":[[1.', 4),
        ({"type": "object"}, b'{"a":["x\\', 4),
        ({"type": "object"}, b'{"a":["\xf0\x9f', 5),
        ({"type": "object"}, b'{  "a" :  ', 2),
        (NODE, b"", 46),
        (NODE, b'{"value":123,"parts":[{"va', 90),
        (LISTS, b"[[", 10),
        (LISTS, b"", 8),
        (LINKED, b"", 24),  # The completion may use the optional key "next".
        (
            {"anyOf": [{"$ref": "#/$defs/node"}, {"enum": ["a rather long word"]}], "$defs": NODE["$defs"]},
            b"",
            20,
        ),
        ({"type": "string", "minLength": 40}, b'"ab', 39),
        ({"type": "string", "pattern": "^[a-z]+0$"}, b'"word', 2),
        ({"type": "string", "format": "email"}, b'"a', 3),
        ({"type": "string", "format": "email"}, b"", 5),
        ({"type": "string", "format": "ipv6"}, b"", 4),
        ({"type": "string", "format": "uri"}, b'"ht', 2),
        ({"type": "string", "pattern": "abc"}, b"", 5),
        ({"type": "string", "pattern": "abc"}, b'"zab', 2),
        ({"type": "string", "pattern": "FOO_TYPE|BAR_TYPE"}, b'"FO', 7),
        ({"type": "string", "pattern": "@", "minLength": 9}, b"", 11),
        ({"type": "string", "allOf": [{"pattern": "[a-m]$"}, {"pattern": "^[^b-e][g-z]"}]}, b"", 4),
        ({"type": "string", "format": "uuid"}, b'"0123', 33),
        ({"type": "string", "format": "date-time"}, b"", 30),
        ({"enum": ["red", "green", "grey"]}, b'"g', 5),
        ({"type": "integer", "minimum": 100, "multipleOf": 7}, b"1", 2),
        ({"type": "number", "minimum": 0.5, "maximum": 0.75}, b"", 4),
        ({"type": "array", "minItems": 6, "items": {"type": "boolean"}}, b"[", 42),
        (MANY | {"required": ["key 29"]}, b"{", 11),
        (MANY | {"required": list(MANY["properties"])}, b'{"key 0":1', 316),
    ],
)
def test_a_text_is_completed(schema, said, length):
    grammar = Grammar(schema, Bounds())
    text = close(closings_of(grammar.text), grammar.matcher, said)
    validator(schema).validate(json.loads(text))
    assert len(text.encode()) - len(said) <= length


@pytest.mark.parametrize(
    ("pattern", "said"),
    [
        ("a+b", b"a"),
        ("[a-z]+0", b""),
        ("(ab|cd){3}x", b"ab"),
        ('("x")+y', b'"'),
        (r"[a-z]{3}[.][^a]+a!?", b""),
    ],
)
def test_texts_that_are_not_json_are_completed(pattern, said):
    matcher = LLMatcher(TOKENIZER, LLMatcher.grammar_from_regex(pattern), log_level=0)
    closings = Closings(BYTES, hints_of(GrammarRequest("regex", pattern)))
    assert len(close(closings, matcher, said)) < 20


def test_a_property_may_have_the_name_of_a_number_keyword():
    """A property named `minimum` is not a bound."""
    schema = {"properties": {"minimum": False, "multipleOf": False, "a": {"minimum": 2}}, "required": ["a"]}
    grammar = Grammar({"type": "object", **schema})
    closings = closings_of(grammar.text)
    assert bytes(closings.shortest(grammar.matcher)) == b'{"a":2}'


def test_completion_with_an_incomplete_byte_vocabulary():
    tokens = [b"" if byte in b"a0-:\xff" else bytes([byte]) for byte in range(256)] + [b"", b'":', b"true"]
    engine = LLGuidance(lambda: tokens, lambda text: [], frozenset([256]), [256], len(tokens), 1)
    schema = {
        "properties": {"b": {"type": "string", "pattern": "^[a-c]$"}, "c": {"type": "integer"}},
        "required": ["b", "c"],
    }
    asked = {"type": "json_schema", "json_schema": {"schema": {"type": "object", **schema}}}
    with pytest.raises(InvalidRequest, match="no answer with at most"):  # A lone colon is not a token.
        engine.compile(grammar_of({**asked, "on_truncation": "close"}))
    tokens[ord(":")] = b":"
    engine = LLGuidance(lambda: tokens, lambda text: [], frozenset([256]), [256], len(tokens), 1)
    path = engine.compile(grammar_of({**asked, "on_truncation": "close"})).closer(40).path
    assert json.loads(b"".join(tokens[token] for token in path)) == {"b": "b", "c": 1}


def test_a_budget_is_kept():
    grammar = Grammar(MANY | {"required": ["key 29"]}, Bounds())
    closings, matcher = closings_of(grammar.text), grammar.matcher
    assert close(closings, matcher, b"{", 11) == '{"key 29":0}' and close(closings, matcher, b"{", 10) is None
    word = Grammar({"const": "a word"})
    assert close(closings_of(word.text), word.matcher, b"", 7) is None
    long = Grammar({"type": "string", "minLength": 5000})
    assert closings_of(long.text).shortest(long.matcher) is None


def reach(grammar: Grammar, case: Case, data: st.DataObject, source: random.Random) -> tuple[bytes, bytes]:
    """Return a prefix (an instance's first bytes, perhaps followed by random allowed bytes), and the
    instance's rest.
    """
    text = json.dumps(data.draw(case.instances), ensure_ascii=False, separators=(",", ":")).encode()
    cut = source.randrange(len(text))
    matcher, said = grammar.matcher.deep_copy(), bytearray(text[:cut])
    assert not said or matcher.consume_tokens(list(said))
    for _ in range(source.choice([0, 0, 1, 5])):
        options = [token for token in allowed(matcher) if token != END]
        if not options:
            break
        said.append(source.choice(options))
        assert matcher.consume_token(said[-1])
    return bytes(said), text[cut:]


def check_closing(case: Case, seed: int, data: st.DataObject) -> None:
    """Check the completion from a random position. With a fixed key order (half the cases), the completion
    must be no longer than the instance. With any order, a longer completion is allowed.
    """
    in_order = seed % 2 == 0
    grammar = Grammar(case.schema, Bounds(ordered=64 if in_order else 0))
    source = random.Random(seed)
    said, rest = reach(grammar, case, data, source)
    text = close(closings_of(grammar.text), grammar.matcher, said)
    validator(case.schema).validate(json.loads(text))
    whole = (said + rest).decode(errors="replace")  # An incomplete character becomes U+FFFD.
    if in_order and grammar.accepts(whole):
        assert len(text.encode()) <= len(whole.encode())


@RANDOM
@given(cases(), st.integers(0, 2**32), st.data())
def test_a_completion_is_valid_and_at_most_as_long_as_an_instance(case: Case, seed: int, data: st.DataObject):
    check_closing(case, seed, data)


@pytest.mark.soak
@settings(RANDOM, max_examples=2_000, derandomize=False)
@given(cases(), st.integers(0, 2**32), st.data())
def test_completions_of_many_schemas_are_short(case: Case, seed: int, data: st.DataObject):
    check_closing(case, seed, data)


def shortest(grammar: Grammar) -> int:
    return len(closings_of(grammar.text).shortest(grammar.matcher))


def closer_of(grammar: Grammar, budget: int) -> Closer:
    closings = closings_of(grammar.text)
    return Closer(closings, closings.shortest(grammar.matcher), [END], budget)


def speak(grammar: Grammar, budget: int, source: random.Random, wanted: bytes) -> tuple[bytes, list[int]]:
    """Simulate a model that generates `wanted` and then random allowed bytes. Returns the text (at most
    `budget` tokens) and the completion's length at each token.
    """
    matcher, said, known = grammar.matcher.deep_copy(), bytearray(), []
    closer = closer_of(grammar, budget)
    for at in range(budget):
        options = allowed(matcher)
        fits = at < len(wanted) and bytes(said) == wanted[:at] and wanted[at] in options
        token = closer.choose(matcher, wanted[at] if fits else source.choice(options))
        assert token in options
        known.append(len(closer.path))
        if token == END:
            return bytes(said), known
        closer.accept(matcher, token)
        assert closer.path is not None and matcher.consume_token(token)
        said.append(token)
        if matcher.is_stopped():
            return bytes(said), known
    assert matcher.is_accepting()
    return bytes(said), known


@RANDOM
@given(cases(), st.integers(0, 2**32), st.data())
def test_a_text_ends_within_its_budget_for_any_model(case: Case, seed: int, data: st.DataObject) -> None:
    grammar = Grammar(case.schema, Bounds())
    least = shortest(grammar)
    for budget in (least, least + 1, least + random.Random(seed).randrange(60)):
        # With a budget above `least` + 1, the model generates only random allowed bytes.
        wanted = json.dumps(data.draw(case.instances), ensure_ascii=False).encode()
        text, known = speak(grammar, budget, random.Random(seed), wanted if budget <= least + 1 else b"")
        assert len(text) <= budget
        validator(case.schema).validate(json.loads(text))
    check_again(grammar, budget, text, known)


def check_again(grammar: Grammar, budget: int, text: bytes, known: list[int]) -> None:
    """Check that in a second run over the text's tokens, the completions have the same lengths."""
    matcher, closer = grammar.matcher.deep_copy(), closer_of(grammar, budget)
    for at, token in enumerate(text):
        assert closer.left == budget - at and len(closer.path) == known[at]
        closer.accept(matcher, token)
        assert matcher.consume_token(token)


def test_a_long_text_of_a_wide_set_is_found_in_few_steps(monkeypatch):
    # The number of automaton steps is bounded, both if a text is found and if none exists.
    steps, behind = [], PatternAutomaton.advance
    monkeypatch.setattr(
        PatternAutomaton, "advance", lambda self, now, char: steps.append(char) or behind(self, now, char)
    )
    assert len(TextPattern(("[B-Z].*",), 200).rest("")) == 200 and len(steps) < 1_000
    few = len(steps)
    assert TextPattern((".*x.{15}y.*", ".*y.{15}x.*"), 8_000).rest("") is None and len(steps) - few < 10_000


def test_words_are_not_searched_as_numbers(monkeypatch):
    """Outside a number, the search does not mistake the letter e for an exponent."""
    asked, allows = [], Search._allows_tokens
    monkeypatch.setattr(
        Search, "_allows_tokens", lambda self, way, tokens: asked.append(tokens) or allows(self, way, tokens)
    )
    lines = 'start: item+\nitem: "- " /[a-z]+/ (" (" item ")")? "\\n"\n'
    matcher = LLMatcher(TOKENIZER, LLMatcher.grammar_from_lark(lines), log_level=0)
    closings = Closings(BYTES, hints_of(GrammarRequest("lark", lines)))
    assert closings.shortest(matcher) is not None and 1_000 < len(asked) < 20_000


DEEP_SCHEMAS = [
    ({"type": "array", "items": {"$ref": "#"}}, "["),
    ({"type": "object", "additionalProperties": {"$ref": "#"}}, '{"a":'),
    (
        {
            "type": "object",
            "properties": {"a": {"$ref": "#"}, "b": {"type": "integer"}},
            "required": ["b"],
            "additionalProperties": False,
        },
        '{"a":',
    ),
]


@pytest.mark.parametrize(("schema", "level"), DEEP_SCHEMAS)
def test_a_deep_text_is_not_searched_for_an_end_after_every_token(schema, level, monkeypatch):
    searches, closing = [], Closings.closing
    monkeypatch.setattr(Closings, "closing", lambda *given: searches.append(given[2]) or closing(*given))
    grammar, budget, text = Grammar(schema), 900, bytearray()
    matcher, closer = grammar.matcher.deep_copy(), closer_of(grammar, budget)
    searches.clear()
    while not closer.must_end(matcher):
        wanted = ord(level[len(text) % len(level)])
        options = allowed(matcher)
        if END in options:
            break
        token = closer.choose(matcher, wanted if wanted in options else options[0])
        closer.accept(matcher, token)
        assert matcher.consume_token(token)
        text.append(token)
    assert matcher.is_accepting() and len(text) <= budget
    assert len(searches) < 250, "one for each level of the first 32, then few"
    json.loads(text)
