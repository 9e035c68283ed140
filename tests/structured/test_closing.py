"""Ways to the end of a text: they are valid, about as short as can be, and a text that keeps one in mind ends
within its budget whatever the model says."""

import json
import random

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from llguidance import LLMatcher

from mmengine.structured_output.closer import Closer
from mmengine.structured_output.closing import Vocabulary
from mmengine.structured_output.json_schema.gate import Bounds
from tests.structured.accepting import END, TOKENIZER, Grammar, allowed
from tests.structured.strategies import Case, cases
from tests.structured.test_schema_random import validator

BYTES = Vocabulary([bytes([byte]) for byte in range(256)] + [b""])
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
MANY = {"type": "object", "properties": {f"key {n}": {"type": "integer"} for n in range(30)}}


def close(matcher, said=b"", budget=4096):
    """The text that a closing behind `said` makes."""
    matcher = matcher.deep_copy()
    assert not said or matcher.consume_tokens(list(said))
    path = BYTES.closing(matcher, budget)
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
        ({"type": "string", "minLength": 40}, b'"ab', 39),
        ({"type": "string", "pattern": "^[a-z]+0$"}, b'"word', 2),
        ({"type": "string", "format": "email"}, b'"a', 40),
        ({"type": "string", "format": "uuid"}, b'"0123', 33),
        ({"type": "string", "format": "date-time"}, b"", 30),
        ({"enum": ["red", "green", "grey"]}, b'"g', 5),
        ({"type": "integer", "minimum": 100, "multipleOf": 7}, b"1", 12),
        ({"type": "number", "minimum": 0.5, "maximum": 0.75}, b"", 4),
        ({"type": "array", "minItems": 6, "items": {"type": "boolean"}}, b"[", 42),
        (MANY | {"required": ["key 29"]}, b"{", 200),
        (MANY | {"required": list(MANY["properties"])}, b'{"key 0":1', 330),
    ],
)
def test_a_text_is_closed(schema, said, length):
    grammar = Grammar(schema, Bounds())
    text = close(grammar.matcher, said)
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
def test_what_is_no_json_is_closed_too(pattern, said):
    matcher = LLMatcher(TOKENIZER, LLMatcher.grammar_from_regex(pattern), log_level=0)
    assert len(close(matcher, said)) < 80


def test_a_budget_is_kept():
    grammar = Grammar(MANY | {"required": ["key 29"]}, Bounds())
    matcher = grammar.matcher.deep_copy()
    assert matcher.consume_token(ord("{"))
    way = BYTES.closing(matcher, 4096)
    assert BYTES.closing(matcher, len(way)) == way and BYTES.closing(matcher, 11) is None
    assert bytes(BYTES.shortest(matcher)) == b'"key 29":0}' and len(way) > 11
    assert BYTES.closing(Grammar({"const": "a word"}).matcher, 7) is None
    assert BYTES.shortest(Grammar({"type": "string", "minLength": 5000}).matcher) is None


def reach(grammar: Grammar, case: Case, data: st.DataObject, source: random.Random) -> tuple[bytes, bytes]:
    """A place that texts come by: the beginning of an instance, and perhaps what else is allowed behind it;
    and how the instance goes on."""
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


@RANDOM
@given(cases(), st.integers(0, 2**32), st.data())
def test_a_closing_is_valid_and_at_most_as_long_as_an_instance(
    case: Case, seed: int, data: st.DataObject
) -> None:
    grammar, source = Grammar(case.schema, Bounds()), random.Random(seed)
    said, rest = reach(grammar, case, data, source)
    validator(case.schema).validate(json.loads(close(grammar.matcher, said)))
    if grammar.accepts((said + rest).decode(errors="replace")):
        matcher = grammar.matcher.deep_copy()
        assert not said or matcher.consume_tokens(list(said))
        assert len(BYTES.shortest(matcher)) <= len(rest)


def speak(grammar: Grammar, budget: int, source: random.Random, wanted: bytes) -> tuple[bytes, list[int]]:
    """A text of at most `budget` tokens by a speaker who says `wanted` and then anything that is allowed;
    and how long the known closing was at each token."""
    matcher, said, known = grammar.matcher.deep_copy(), bytearray(), []
    closer = Closer(BYTES, BYTES.shortest(matcher), [END], budget)
    for at in range(budget):
        options = allowed(matcher)
        fits = at < len(wanted) and bytes(said) == wanted[:at] and wanted[at] in options
        token = closer.keep(matcher, wanted[at] if fits else source.choice(options))
        assert token in options
        known.append(len(closer.path))
        if token == END:
            return bytes(said), known
        closer.said(matcher, token)
        assert closer.path is not None and matcher.consume_token(token)
        said.append(token)
        if matcher.is_stopped():
            return bytes(said), known
    assert matcher.is_accepting()
    return bytes(said), known


@RANDOM
@given(cases(), st.integers(0, 2**32), st.data())
def test_a_text_ends_within_its_budget_whatever_is_said(case: Case, seed: int, data: st.DataObject) -> None:
    grammar = Grammar(case.schema, Bounds())
    shortest = len(BYTES.shortest(grammar.matcher))
    for budget in (shortest, shortest + 1, shortest + random.Random(seed).randrange(60)):
        wanted = json.dumps(data.draw(case.instances), ensure_ascii=False).encode()
        text, _ = speak(grammar, budget, random.Random(seed), wanted)
        assert len(text) <= budget
        validator(case.schema).validate(json.loads(text))


@RANDOM
@given(cases(), st.integers(0, 2**32))
def test_who_goes_through_the_tokens_again_knows_the_same(case: Case, seed: int) -> None:
    grammar, source = Grammar(case.schema, Bounds()), random.Random(seed)
    budget = len(BYTES.shortest(grammar.matcher)) + source.randrange(40)
    text, known = speak(grammar, budget, source, b"")
    matcher = grammar.matcher.deep_copy()
    closer = Closer(BYTES, BYTES.shortest(matcher), [END], budget)
    for at, token in enumerate(text):
        assert closer.left == budget - at and len(closer.path) == known[at]
        closer.said(matcher, token)
        assert matcher.consume_token(token)
