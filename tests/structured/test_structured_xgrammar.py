"""Test that xgrammar's grammars are exact, and that unsupported constructs are refused by name."""

import json
import random
import re
import sys
from collections import Counter
from fractions import Fraction
from functools import partial

import jsonschema
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from mmengine.errors import ConfigError, InvalidRequest
from mmengine.request import GrammarRequest
from mmengine.structured_output.engines.backends import GRAMMAR_BACKENDS
from mmengine.structured_output.json_schema.normalization import Bounds, normalize_schema
from mmengine.structured_output.json_schema.vocabulary.refusal import SchemaRefused
from mmengine.structured_output.report.report import check_schema
from mmengine.structured_output.request.spec import draft_grammars_of, grammar_of
from mmengine_xgrammar.schema import schema_ebnf
from tests.structured import accepting
from tests.structured.accepting import allowed
from tests.structured.strategies import Case, cases

pytest.importorskip("xgrammar")
END = 256
RANDOM = settings(
    max_examples=100,
    deadline=None,
    phases=[Phase.generate],
    suppress_health_check=list(HealthCheck),
    derandomize=True,
)

FULL = "7" * 40
LIMITED_NUMBERS = [
    *(({"type": "integer", **bound}, FULL) for bound in ({"minimum": 0}, {"minimum": 12})),
    *(({"type": "integer", **bound}, "-" + FULL) for bound in ({}, {"maximum": 5})),
    *(({"type": "number", **bound}, FULL) for bound in ({}, {"exclusiveMinimum": 0.5})),
    ({}, "[" + FULL),
    ({"type": "array", "items": {"type": ["integer", "null"]}}, "[1," + FULL),
]


@pytest.fixture(scope="module")
def backend():
    tokens = [*(bytes([byte]) for byte in range(256)), b""]
    return GRAMMAR_BACKENDS.load("xgrammar")(
        lambda: tokens, lambda text: list(text.encode()), frozenset(), (END,), END + 1
    )


def start(backend, schema, bounds=None):
    return backend.compile(
        GrammarRequest("json_schema", normalize_schema(schema, bounds or Bounds.off()).text)
    ).matcher()


accepts = partial(accepting.accepts, end=END)


def walk(matcher, source, length):
    """Return a text from random allowed bytes; None if the text has not ended after `length` bytes."""
    matcher, out = matcher.deep_copy(), bytearray()
    while len(out) < length:
        options = allowed(matcher, END)
        assert options, bytes(out)
        if END in options and (len(options) == 1 or source.random() < 0.3):
            return out.decode()
        options = [byte for byte in options if byte != END]
        closing = [byte for byte in options if byte in b'"]}']
        byte = source.choice(closing if closing and source.random() < 0.1 + len(out) / length else options)
        assert matcher.consume_token(byte)
        out.append(byte)
    return None


def number_texts():
    for whole in (*range(13), 25, 99, 100, 101, 123, 250, 999, 1000, 1005):
        for behind in (
            "",
            ".0",
            ".00",
            ".5",
            ".25",
            ".50",
            ".7",
            ".75",
            ".749",
            ".751",
            ".001",
            ".999",
            ".1",
        ):
            yield f"{whole}{behind}"
            yield f"-{whole}{behind}"


RANGES = [
    {},
    {"minimum": 0},
    {"minimum": 10.75},
    {"exclusiveMinimum": 0},
    {"exclusiveMinimum": -0.75},
    {"maximum": 10.75},
    {"maximum": -2.5},
    {"exclusiveMaximum": 100},
    {"exclusiveMaximum": 0},
    {"minimum": -2.5, "maximum": 10.75},
    {"minimum": 2, "exclusiveMaximum": 2.75},
    {"exclusiveMinimum": 9, "maximum": 101},
    {"minimum": 0.25, "maximum": 0.25},
    {"exclusiveMinimum": 99.5, "exclusiveMaximum": 1000.75},
]


@pytest.mark.parametrize("multiple", [None, 1, 0.5, 0.25, 2.5, 3, 7, 50, 0.01])
def test_numbers_are_accepted_if_valid(backend, multiple):
    """Test all bounds and multiples against exact fractions."""
    for bounds in RANGES:
        extra = {} if multiple is None else {"multipleOf": multiple}
        try:
            matcher = start(backend, {"type": "number", **bounds, **extra})
        except SchemaRefused as refused:
            assert "contradict each other" in str(refused)
            matcher = None  # No number satisfies both keywords.
        places = 99 if multiple is None else len(str(multiple).partition(".")[2].rstrip("0"))
        for text in number_texts():
            value = Fraction(text)
            fits = (
                value >= Fraction(str(bounds.get("minimum", -(10**9))))
                and value > Fraction(str(bounds.get("exclusiveMinimum", -(10**9))))
                and value <= Fraction(str(bounds.get("maximum", 10**9)))
                and value < Fraction(str(bounds.get("exclusiveMaximum", 10**9)))
                and (multiple is None or (value / Fraction(str(multiple))).denominator == 1)
            )
            got = matcher is not None and accepts(matcher, text)
            assert fits or not got, (bounds, extra, text)
            spelled = len(text.partition(".")[2]) <= places and not (value == 0 and text.startswith("-"))
            assert got or not (fits and spelled), (bounds, extra, text)


@pytest.mark.parametrize("bounds", [{}, {"minimum": -7, "maximum": 1004}, {"minimum": 100}, {"maximum": -9}])
@pytest.mark.parametrize("multiple", [1, 2, 3, 10])
def test_integers_are_accepted_if_valid(backend, bounds, multiple):
    matcher = start(backend, {"type": "integer", "multipleOf": multiple, **bounds})
    for value in range(-120, 1100):
        fits = bounds.get("minimum", value) <= value <= bounds.get("maximum", value) and value % multiple == 0
        assert accepts(matcher, str(value)) == fits, value
    assert not accepts(matcher, "1.0") and not accepts(matcher, "01") and not accepts(matcher, "")


@pytest.mark.parametrize(
    ("regex", "texts"),
    [
        ("[a-c]{2,3}x?", ["ab", "abc", "abcx", "a", "abcd", "abx"]),
        ("(?:ab|c)*[^a-z\\x22]", ["ab!", "ccab!", '"', "abc", "é", "\n"]),
        ("(?s:.)+", ["\n", "", "a\nb", "\\"]),
        (".{0,2}", ["", "é😀", "\n", "abc"]),
        (r"\$\.\u00e9\U0001F600[\]\-\\]", ["$.é😀]", "$.é😀\\", "$.é😀-", "$.é😀a"]),
        ("(a|b){2}|(c(d|e)+){1,2}", ["ab", "aba", "cd", "cdec", "cdecde", "cdcdcd", "c"]),
        ("a{3,}", ["aa", "aaa", "aaaaaa"]),
        ("(ab?){0,3}", ["", "aab", "ababab", "abababa"]),
    ],
)
def test_a_regex_matches_as_in_python(backend, regex, texts):
    matcher = backend.compile(grammar_of(grammar={"regex": regex})).matcher()
    for text in texts:
        pattern = re.sub(r"\\U0001F600", "😀", regex)
        assert accepts(matcher, text) == bool(re.fullmatch(pattern, text)), text
        if "(?s" not in regex and "\\U" not in regex:  # ECMA-262 has neither (?s:…) nor \U.
            in_json = start(backend, {"type": "string", "pattern": f"^(?:{regex})$"})
            wanted = bool(re.fullmatch(pattern, text))
            assert accepts(in_json, json.dumps(text, ensure_ascii=False)) == wanted, text


def test_strings_contain_any_json_spelling(backend):
    matcher = start(backend, {"type": "string", "minLength": 1, "maxLength": 3})
    for text in ("a", "é😀x", '\n"\\', "\x00\x1f", "/"):
        assert accepts(matcher, json.dumps(text, ensure_ascii=False)), text
    for text in ('""', '"abcd"', '"a\tb"', '"\x01"', '"\\x"', '"\\u00zz"', '"\\ud800"', '"a'):
        assert not accepts(matcher, text), text


def test_no_text_slows_a_step(backend):
    """Two cases could be slow: a pattern whose repetitions can begin anywhere, and a forced text of
    exponential length.
    """
    schema = {"type": "string", "pattern": "a.*b.*c.*a[a-z-]*b[a-z-]*c"}
    # The 2,000 steps took 40 s with xgrammar's own repetition, and take 20 ms with recursive rules.
    rules = re.sub(
        r'"(\\.|[^"\\])*"|\[(\\.|[^]\\])*\]', "", schema_ebnf(normalize_schema(schema, Bounds.off()).text)
    )
    assert "::=" in rules and not re.search("[*+?{]", rules)
    matcher = start(backend, schema)
    assert matcher.consume_token(ord('"'))
    for byte in b"ab-c" * 500:
        matcher.compute_bitmask()
        assert matcher.consume_token(byte)
    nodes = {
        f"n{at}": {"type": "array", "prefixItems": [{"$ref": f"#/$defs/n{at + 1}"}] * 2} for at in range(40)
    }
    for node in nodes.values():
        node |= {"items": False, "minItems": 2}
    matcher = start(
        backend, {"$ref": "#/$defs/n0", "$defs": {**nodes, "n40": {"const": 1}}}, Bounds(whitespace=1)
    )
    assert matcher.compute_ff_tokens() == []  # White space may come first.
    assert matcher.consume_tokens(list(b"[[[["))


def test_fixed_white_space_is_supported(backend):
    """Draft grammars use fixed white space."""
    schema = {
        "type": "object",
        "properties": {"a": {"const": 1}, "b": {"type": "null"}},
        "required": ["a", "b"],
    }
    form = {"type": "json_schema", "json_schema": {"schema": schema | {"additionalProperties": False}}}
    draft_grammars = draft_grammars_of(grammar_of(form))
    forced = []
    for text in draft_grammars:
        matcher = backend.compile(text).matcher()
        forced.append(bytes(matcher.compute_ff_tokens()).decode())
        assert matcher.try_consume_tokens(list(forced[-1].encode() + b"}")) == len(forced[-1]) + 1
        assert matcher.is_stopped() and not matcher.is_error()
    assert forced == ['{"a":1,"b":null', '{"a": 1, "b": null']


def refusal(backend, schema, bounds=None):
    with pytest.raises(SchemaRefused) as caught:
        start(backend, schema, bounds)
    assert "grammar_backend xgrammar" in str(caught.value)
    return caught.value


@pytest.mark.parametrize(
    ("schema", "keyword", "pointer"),
    [
        (
            {"type": "object", "properties": {"a/b": {"type": "string", "maxLength": 300}}},
            "maxLength",
            "#/properties/a~1b/maxLength",
        ),
        (
            {"type": "array", "items": {"type": "string", "pattern": "-", "maxLength": 9}},
            "pattern",
            "#/items/pattern",
        ),
        ({"type": "string", "pattern": "^\\p{L}$"}, "pattern", "#/pattern"),
        ({"type": "string", "pattern": "^a{300}$"}, "pattern", "#/pattern"),
        ({"allOf": [{"type": "string", "pattern": "a"}, {"pattern": "b"}]}, "allOf", "#/allOf"),
        (
            {
                "type": "object",
                "patternProperties": {"a$": {"type": "null"}},
                "additionalProperties": {"type": "boolean"},
            },
            "additionalProperties",
            "#/additionalProperties",
        ),
        (
            {"type": "object", "patternProperties": {"^a": {"type": "null"}, "^b": {"type": "null"}}},
            "patternProperties",
            "#/patternProperties",
        ),
        ({"type": "integer", "multipleOf": 9973}, "multipleOf", "#/multipleOf"),
    ],
)
def test_inexact_keywords_are_refused(backend, schema, keyword, pointer):
    refused = refusal(backend, schema)
    assert (refused.keyword, refused.pointer) == (keyword, pointer)


def test_the_refusal_of_a_bound_says_how_to_switch_it_off(backend):
    refused = refusal(backend, {"type": "string"}, Bounds(string=4096))
    assert refused.keyword == "maxLength" and '"bounds": {"string": 0}' in str(refused)
    start(backend, {"type": "string"}, Bounds(string=0))


@pytest.mark.parametrize(
    ("grammar", "says"),
    [
        ({"regex": "(a"}, "a group is not closed"),
        ({"regex": r"\d+"}, r"\d is not known with xgrammar"),
        ({"regex": "^a"}, "the whole text has to match anyway"),
        ({"regex": "((a*)*)*b"}, "a repetition of a repetition"),
        ({"regex": "(a?)+b"}, "a repetition of a part that may be empty"),
        ({"regex": "(?i:a)"}, "is not known with xgrammar"),
        ({"regex": "a{129}"}, "more than 128 repetitions"),
        ({"lark": "start: /a/"}, "does not read llguidance's Lark"),
    ],
)
def test_other_grammars_are_refused_by_name(backend, grammar, says):
    with pytest.raises(InvalidRequest, match="^the grammar cannot be used: .*" + re.escape(says)):
        backend.compile(grammar_of(grammar=grammar))


def test_random_schemas_are_enforced_or_refused(backend):
    """Accepted texts are valid, and valid texts are accepted; most schemas are enforced."""
    counted: Counter = Counter()

    @RANDOM
    @given(cases(), st.data(), st.integers(0, 2**32), st.booleans())
    def check(case: Case, data, seed: int, bounded: bool):
        validator = jsonschema.Draft202012Validator(
            case.schema, format_checker=jsonschema.Draft202012Validator.FORMAT_CHECKER
        )
        try:
            matcher = start(backend, case.schema, Bounds(string=0) if bounded else None)
        except SchemaRefused as refused:
            counted["refused: " + refused.keyword] += 1
            return
        counted["enforced"] += 1
        source = random.Random(seed)
        for _ in range(3):
            text = walk(matcher, source, 400)
            counted["texts that ended" if text is not None else "texts that did not end"] += 1
            if text is not None:
                validator.validate(json.loads(text))
            assert accepts(matcher, json.dumps(data.draw(case.instances), ensure_ascii=False)), case.schema

    check()
    print(dict(counted))
    refused = sum(count for name, count in counted.items() if name.startswith("refused"))
    assert counted["enforced"] > refused and counted["texts that ended"] > 100


NULLS = {"type": "object", "properties": dict.fromkeys("abcde", {"type": "null"})}
TREE = NULLS | {"properties": {"n": {"$ref": "#"}, **NULLS["properties"]}}
FREE = Bounds(whitespace=0, string=0, decimals=0, digits=0, key=0)  # No bounds except the order of keys.


@pytest.mark.parametrize(
    ("schema", "pointer", "count"),
    [
        (NULLS, "#", 1),
        (TREE, "#", 1),
        ({"type": "array", "items": {"anyOf": [NULLS, {"type": "null"}]}}, "#/items/anyOf/0", 1),
        ({"type": "array", "prefixItems": [NULLS, True]}, "#/prefixItems/0", 1),
        ({"type": "object", "additionalProperties": NULLS}, "#/patternProperties/", 1),
        ({"type": "object", "properties": {"a": NULLS, "b": NULLS}}, "#/properties/a", 2),
        (NULLS | {"required": list("abcde"), "additionalProperties": False}, "", 0),
        ({"type": "object", "properties": {"x-any-order": True}}, "", 0),
    ],
)
def test_objects_in_one_order_are_noted(backend, schema, pointer, count):
    """xgrammar fixes the order of an object's keys. A note names each object for which the default engine
    allows any order. There are no other notes.
    """
    found = backend.notes(GrammarRequest("json_schema", normalize_schema(schema, FREE).text))
    assert sum(note.count for note in found) == count
    for note in found:
        assert note.keyword == "properties" and note.pointer.startswith(pointer)
        assert re.search("^keys only in this order, .*: (n, )?a, b, c, d, e; grammar_backend", note.text)


def test_notes_on_order_are_true(backend):
    report, default = check_schema(NULLS, bounds=FREE, backend="xgrammar"), check_schema(NULLS, bounds=FREE)
    assert (report.verdict, len(report.approximations), default.verdict) == ("approximated", 1, "exact")
    matcher = start(backend, NULLS, FREE)
    assert accepts(matcher, '{"a":null,"c":null,"other":1}')
    assert not accepts(matcher, '{"c":null,"a":null}') and not accepts(matcher, '{"other":1,"a":null}')
    assert accepting.Grammar(NULLS, FREE).accepts('{"other":1,"c":null,"a":null}')


def test_without_the_package_the_engine_says_what_to_install(monkeypatch):
    monkeypatch.delitem(sys.modules, "mmengine_xgrammar.backend", raising=False)
    monkeypatch.setitem(sys.modules, "xgrammar", None)
    with pytest.raises(ConfigError, match=re.escape("pip install '.[xgrammar]'")):
        GRAMMAR_BACKENDS.load("xgrammar")


@pytest.mark.parametrize(("schema", "text"), LIMITED_NUMBERS)
def test_only_the_end_follows_the_maximum_number_of_digits(backend, schema, text):
    source = normalize_schema(schema).text
    counted = GrammarRequest("json_schema", source, max_digits=40)
    matcher = backend.compile(counted).matcher()
    assert matcher.try_consume_tokens(list((text + "7").encode())) == len(text)
    unlimited = GrammarRequest("json_schema", source, max_digits=0)
    assert backend.compile(unlimited).matcher().try_consume_tokens(list((text + "7").encode())) > len(text)
    assert any("at most 40 digits" in note.text for note in backend.notes(counted))


def test_a_maximum_of_digits_keeps_shorter_numbers_and_gives_way_to_bounds(backend):
    def accepting_texts(schema, most):
        request = GrammarRequest("json_schema", normalize_schema(schema, Bounds.off()).text, max_digits=most)
        return [each for each in texts if accepts(backend.compile(request).matcher(), each)]

    texts = [*number_texts(), "1e3", "-0", "0.001", "99999.12345"]
    for bound in ({}, {"minimum": 0}, {"minimum": 99.5}, {"exclusiveMaximum": 10}, {"exclusiveMinimum": 0.5}):
        for kind in ("integer", "number"):
            schema = {"type": kind, **bound}
            assert accepting_texts(schema, 12) == accepting_texts(schema, 0) != [], schema
    texts = ["7" * 15]
    for bounds in ({"minimum": 10**14}, {"minimum": 0, "maximum": 10**15}):
        assert accepting_texts({"type": "integer", **bounds}, 3) == texts
