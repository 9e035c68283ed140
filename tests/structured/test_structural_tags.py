"""Tests free text with structural tags token by token, with a simple parser as reference."""

import json
import random

import jsonschema
import msgspec
import numpy as np
import pytest

from mmengine.structured_output.engines.llguidance.backend import LLGuidance
from mmengine.structured_output.request.spec import grammar_of, read_grammar
from mmengine.structured_output.request.structural_tags import StructuralTag

PAIRS = [
    b"<f",
    b"=a",
    b">{",
    b'{"',
    b'":',
    b'"}',
    b"}<",
    b"</",
    b"ll",
    b"\xc3\xa9",
    b"</f>",
    b"<call>",
    b"}\n",
    b"aa",
]
NAMES = [b"<|end|>", b"<|call|>", b"<|close|>", b"<|image|>"]
TOKENS = [bytes([byte]) for byte in range(256)] + PAIRS + NAMES
END, CALL, CLOSE, IMAGE = range(len(TOKENS) - 4, len(TOKENS))
CITY = {
    "type": "object",
    "properties": {
        "city": {"enum": ["Oslo", "Orléans"]},
        "days": {"type": "integer", "minimum": 0, "maximum": 14},
    },
    "required": ["city"],
    "additionalProperties": False,
}
FLAGS = {"type": "array", "items": {"type": "boolean"}, "maxItems": 3}
FUNCTIONS = {
    "structures": [
        {"begin": "<function=weather>", "schema": CITY, "end": "</function>"},
        {"begin": "<function=flags>", "schema": FLAGS, "end": "</function>"},
    ],
    "triggers": ["<function="],
}
WEATHER = '<function=weather>{"city": "Oslo", "days": 3}</function>'
FLAG = "<function=flags>[true]</function>"


def encode(text):
    """Encode with the longest matching token at each position."""
    rest, found = text.encode(), []
    while rest:
        best = max((token for token in PAIRS if rest.startswith(token)), key=len, default=rest[:1])
        found.append(TOKENS.index(best))
        rest = rest[len(best) :]
    return found


@pytest.fixture(scope="module")
def backend():
    return LLGuidance(lambda: TOKENS, encode, frozenset({END, CALL, CLOSE, IMAGE}), (END,), len(TOKENS))


class Accepts:
    """Checks whether a grammar accepts a text, spelled with random tokens. The masks must allow each token,
    and an end token after the text.
    """

    def __init__(self, backend, asked, seed=0):
        self.backend, self.compiled = backend, backend.compile(grammar_of(grammar={"structural_tag": asked}))
        self.random = random.Random(seed)
        self.seen = []  # (token, whether the text could end there) for each token of the last text.

    def allowed(self, matcher):
        bits = np.zeros((1, -(-len(TOKENS) // 32)), np.uint32)
        self.backend.fill([matcher], bits)
        assert not matcher.is_error(), matcher.get_error()
        return set(np.flatnonzero(np.unpackbits(bits.view(np.uint8), bitorder="little")).tolist())

    def reach(self, *parts):
        """Return the matcher after the parts (texts and special tokens), or None if a part is refused."""
        matcher, self.seen = self.compiled.matcher(), []
        for part in parts:
            rest = part if isinstance(part, int) else part.encode()
            while rest != b"":
                can = self.allowed(matcher)
                if isinstance(rest, int):
                    options = [rest] if rest in can else []
                else:
                    options = [token for token in can if token < END and rest.startswith(TOKENS[token])]
                if not options:
                    return None
                token = self.random.choice(sorted(options))
                assert matcher.consume_tokens([token])
                self.seen.append((TOKENS[token], matcher.is_stopped() or END in self.allowed(matcher)))
                rest = b"" if isinstance(rest, int) else rest[len(TOKENS[token]) :]
        return matcher

    def __call__(self, *parts):
        matcher = self.reach(*parts)
        return matcher is not None and (matcher.is_stopped() or END in self.allowed(matcher))


def means(text, structures, triggers):
    """Return whether the text is valid by the definition of tags."""
    while True:
        places = [(text.find(trigger), trigger) for trigger in triggers if trigger in text]
        if not places:
            return True
        text = text[min(places)[0] :]
        found = [each for each in structures if text.startswith(each["begin"])]
        if not found:
            return False
        text = text[len(found[0]["begin"]) :]
        try:
            value, length = json.JSONDecoder().raw_decode(text)
            jsonschema.validate(value, found[0]["schema"])
        except (ValueError, jsonschema.ValidationError):
            return False
        if not text[length:].startswith(found[0]["end"]):
            return False
        text = text[length + len(found[0]["end"]) :]


def test_a_tag_with_counted_items(backend):
    colours = {"type": "array", "items": {"enum": list("abcdef")}, "uniqueItems": True}
    picks = {"type": "object", "properties": {"of": colours}, "required": ["of"]}
    more = {"begin": "<function=picks>", "schema": picks, "end": "</function>"}
    accepts = Accepts(backend, {**FUNCTIONS, "structures": [*FUNCTIONS["structures"], more]})
    tag = '<function=picks>{"of": ["a" , "c"], "x": 1}</function>'
    assert accepts(f"so {tag} and {WEATHER}{tag}{FLAG}, done")
    assert not accepts(tag.replace('"c"', '"a"'))
    assert not accepts(tag, WEATHER.replace("Oslo", "Rom"))


def test_free_text_and_any_number_of_tags_in_it(backend):
    accepts = Accepts(backend, FUNCTIONS)
    for text in (
        "",
        "No tag at all: <func, é, {}",
        WEATHER,
        f"Wait. {WEATHER} and {FLAG}{FLAG}\nbye <function",
        '<function=weather>{\n  "city" : "Orléans"\n}</function>',
    ):
        assert accepts(text) and means(text, **FUNCTIONS), text
    for text in (
        "a <function=",
        "a <function=other>",
        WEATHER[:-1],
        WEATHER[:-1] + "!",
        WEATHER.replace("Oslo", "Rome"),
        WEATHER.replace("3", "15"),
        f"{WEATHER} {FLAG.replace('true', 'true, 1')}",
        f"{WEATHER} {FLAG.replace('weather', 'flags')} <function=weather>[]</function>",
    ):
        assert not accepts(text) and not means(text, **FUNCTIONS), text


def test_an_end_is_allowed_only_in_free_text(backend):
    accepts = Accepts(backend, FUNCTIONS)
    text = f"so: {WEATHER} done"
    begin, behind = (
        text.index("<function=") + len("<function="),
        text.index("</function>") + len("</function>"),
    )
    for _ in range(30):
        assert accepts(text)
        length = 0
        for token, can_end in accepts.seen:
            length += len(token)
            assert can_end == (length < begin or length >= behind), text[:length]


def test_random_texts_are_accepted_if_valid(backend):
    """The texts are random sequences of fragments of tags, with overlapping triggers."""
    asked = {
        "structures": [
            {"begin": "aab", "schema": {"type": "boolean"}, "end": "a"},
            {"begin": "aac", "schema": {"enum": ["aa", "<f"]}, "end": ""},
            {"begin": "<f", "schema": {"type": "integer", "minimum": 0, "maximum": 120}, "end": ">"},
            {"begin": "b<", "schema": {"type": "null"}, "end": "aab"},
        ],
        "triggers": ["aa", "<f", "b<"],
    }
    accepts, source = Accepts(backend, asked, seed=5), random.Random(3)
    pieces = [
        "a",
        "b",
        "c",
        "<",
        "f",
        ">",
        "true",
        "null",
        "12",
        '"aa"',
        '"<f"',
        "aabtruea",
        'aac"aa"',
        "<f7>",
        "b<nullaab",
    ]
    seen = {True: 0, False: 0}
    for _ in range(1_500):
        text = "".join(source.choices(pieces, k=source.randrange(7)))
        wanted = means(text, **asked)
        assert accepts(text) == wanted, text
        seen[wanted] += 1
    assert min(seen.values()) > 300, seen


def test_a_token_that_is_no_text_can_begin_and_end_a_tag(backend):
    asked = {
        "structures": [
            {"begin": "<|call|>\n", "schema": CITY, "end": "\n<|close|>"},
            {"begin": "<|call|>flags<|image|>", "schema": FLAGS, "end": ""},
            {"begin": "see <|image|>!", "schema": FLAGS, "end": "<|close|><|close|>."},
        ],
        "triggers": ["<|call|>", "see <|image|>"],
    }
    accepts, city = Accepts(backend, asked), '{"city":"Oslo"}'
    call = (CALL, f"\n{city}\n", CLOSE)
    assert accepts("plain") and accepts(*call) and accepts("a <|call|> b", *call, *call, "c")
    assert accepts(CALL, "flags", IMAGE, "[]", "then ", *call)
    assert accepts("I see ", IMAGE, "![true]", CLOSE, CLOSE, ". ", "see")
    for wrong in (
        (CALL,),
        (CALL, "\n", city),
        (CALL, city),
        (CALL, f"\n{city}\n<|close|>"),
        (CALL, "flags[]"),
        ("I say ", IMAGE),
        (IMAGE,),
        (CLOSE,),
        ("see ", CALL, "!"),
        (*call, CLOSE),
    ):
        assert not accepts(*wrong), wrong


def test_a_token_that_is_also_text_can_be_spelled_either_way(backend):
    """An example is Qwen's <tool_call>, an added token that is not marked as special."""
    asked = {
        "structures": [{"begin": '<call>\n{"name": "f", "arguments": ', "schema": CITY, "end": "}\n</call>"}],
        "triggers": ["<call>"],
    }
    accepts = Accepts(backend, asked)
    text = 'Well: <call>\n{"name": "f", "arguments": {"city": "Oslo"}}\n</call>'
    assert all(accepts(text + text) for _ in range(20))
    matcher = accepts.reach("Well: ")
    assert TOKENS.index(b"<call>") in accepts.allowed(matcher)
    assert matcher.consume_tokens([TOKENS.index(b"<call>")]) and not matcher.is_stopped()
    assert END not in accepts.allowed(matcher)
    assert not accepts("<call>{") and not accepts("<call>")


def test_minimum_and_maximum_number_of_tags(backend):
    least = Accepts(backend, {**FUNCTIONS, "at_least_one": True})
    assert not least("") and not least("text") and least(f"text {WEATHER} text {FLAG}") and least(WEATHER)
    most = Accepts(backend, {**FUNCTIONS, "stop_after_first": True})
    assert (
        most("") and most("text") and most(f"text {WEATHER}") and most.reach(f"text {WEATHER}").is_stopped()
    )
    one = Accepts(backend, {**FUNCTIONS, "at_least_one": True, "stop_after_first": True})
    assert not one("text") and one(f"text {WEATHER}") and one.reach(WEATHER).is_stopped()
    assert most.reach(f"{WEATHER} ") is None and one.reach(f"{WEATHER} ") is None


def test_tag_schemas_are_bounded(backend):
    structure = {"begin": "<f", "schema": {"type": "array", "items": {"type": "string"}}, "end": "."}
    asked = {"structures": [structure], "triggers": ["<f"]}
    spaces = f"<f[{' ' * 33}]."
    accepts = Accepts(backend, asked)
    assert accepts("<f[ ].") and not accepts(spaces)
    assert Accepts(backend, {**asked, "bounds": False})(spaces)
    assert not Accepts(backend, {**asked, "bounds": {"string": 3}})('<f["xxxx"].')


def test_many_structures(backend):
    structures = [
        {
            "begin": f"<f{n}>",
            "schema": {"type": "object", "properties": {f"p{n}": {"const": n}}},
            "end": "</f>",
        }
        for n in range(128)
    ]
    accepts = Accepts(backend, {"structures": structures, "triggers": ["<f"]})
    assert accepts('<f127>{"p127": 127}</f><f3>{}</f>') and not accepts('<f126>{"p126": 127}</f>')


def test_the_source_is_complete_and_canonical():
    asked = {"type": "structural_tag", **FUNCTIONS}
    grammar = grammar_of(grammar={"structural_tag": FUNCTIONS})
    assert grammar == grammar_of(asked) == grammar_of(grammar={"structural_tag": asked})
    found = read_grammar(grammar)
    assert isinstance(found, StructuralTag) and msgspec.json.encode(found).decode() == grammar.source
    assert found.triggers == ("<function=",) and not found.at_least_one
