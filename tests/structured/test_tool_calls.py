"""Test tool calls as a grammar: accepted texts, refusals, and parsing."""

import json
import random

import jsonschema
import msgspec
import numpy as np
import pytest

from mmengine.errors import InvalidRequest
from mmengine.serve.text.tool_call_parser import ToolCallParser
from mmengine.structured_output.engines.llguidance.backend import LLGuidance
from mmengine.structured_output.request.spec import read_grammar
from mmengine.structured_output.request.tool_calls import RequestedTool, ToolCalls, tool_calls

PIECES = [b"<tool_call>", b"</tool_call>", b'": ', b"</", b">\n", b"\n</parameter>\n<", b'{"name', b"aa"]
END = 256
TOKENS = [bytes([byte]) for byte in range(256)] + [b"<end>"] + PIECES
WEATHER = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 6},
        "unit": {"enum": ["c/h", "f"]},
        "day": {"type": "string", "pattern": "^[a-b/]{2}$"},
        "days": {"type": "integer", "minimum": 0, "maximum": 14},
        "where": {"$ref": "#/$defs/place"},
    },
    "required": ["city"],
    "additionalProperties": False,
    "$defs": {
        "place": {"type": "object", "properties": {"x": {"type": "boolean"}}, "additionalProperties": False}
    },
}
NOTHING = {"type": "object", "properties": {}, "additionalProperties": False}
CALLS = {
    "json": [
        '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo", "unit": "c/h"}}\n</tool_call>',
        '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>',
    ],
    "xml": [
        "<tool_call>\n<function=weather>\n<parameter=city>\n</to\n>\n</parameter>\n<parameter=unit>\nc/h\n"
        '</parameter>\n<parameter=day>\na/\n</parameter>\n<parameter=where>\n{"x": true}\n</parameter>\n'
        "</function>\n</tool_call>",
        "<tool_call>\n<function=now>\n</function>\n</tool_call>",
    ],
}
WRONG = {
    "json": [
        '<tool_call>\n{"name": "weather", "arguments": {}}\n</tool_call>',
        '<tool_call>\n{"name": "other", "arguments": {}}\n</tool_call>',
        '<tool_call>\n{"name": "now", "arguments": 1}\n</tool_call>',
    ],
    "xml": [
        "<tool_call>\n<function=weather>\n</function>\n</tool_call>",
        "<tool_call>\n<function=weather>\n<parameter=city>\n1234567\n</parameter>\n</function>\n</tool_call>",
        "<tool_call>\n<function=weather>\n<parameter=city>\na\n</parameter>\n<parameter=days>\n\"3\"\n</parameter>\n"
        "</function>\n</tool_call>",
    ],
}  # fmt: skip


@pytest.fixture(scope="module")
def backend():
    return LLGuidance(lambda: TOKENS, lambda text: list(text.encode()), frozenset({END}), [END], len(TOKENS))


def asked(schema, name="weather", is_strict=True):
    return RequestedTool(name, json.dumps(schema).encode(), ("tools", 0, "function", "parameters"), is_strict)


def grammar(form, **options):
    return tool_calls([asked(WEATHER), asked(NOTHING, "now")], ToolCalls(form, (), **options))


def accepts(backend, grammar, text):
    matcher, tokens = backend.compile(grammar).matcher(), list(text.encode())
    return matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()


ANSWER = msgspec.Raw(
    b'{"type": "object", "properties": {"a": {"type": "null"}}, "additionalProperties": false}'
)
MARKERS = ("<think>", "</think>")


@pytest.mark.parametrize("form", ["json", "xml"])
def test_allowed_answers(backend, form):
    call, empty = CALLS[form]
    both, text = f"{call}\n{empty}", "a < b <tool_cal"
    cases = [
        ({}, [text, "", call, f"hm {call}", both], [f"{call} and more", f"{call}\n", f"{call}\n\n{empty}"]),
        ({"parallel": False}, [text, empty, f"hm {call}"], [both]),
        ({"choice": "required"}, [call, both, f"\n\n{both}"], [text, "", f"hm {call}"]),
        ({"choice": "named"}, [empty], [both, ""]),
        ({"answer": ANSWER}, ['{"a": null}', both], [text, f"hm {call}", '{"a": 1}']),
        ({"reasoning": MARKERS}, [f"<think><tool_call></think>\n\n{call}", "<think>a</think>b", call], []),
    ]  # fmt: skip
    for options, taken, refused in cases:
        made = grammar(form, **options)
        assert [each for each in taken if not accepts(backend, made, each)] == []
        wrong = refused + [each for each in WRONG[form] if not options.get("answer")]
        assert [each for each in wrong if accepts(backend, made, each)] == []


@pytest.mark.parametrize("form", ["json", "xml"])
def test_allowed_texts_parse_as_valid_calls(backend, form):
    """Parse random answers that the masks allow."""
    made, draw = grammar(form, choice="required"), random.Random(5)
    compiled, whole = backend.compile(made), 0
    for _ in range(25):
        matcher, text = compiled.matcher(), b""
        bits = np.zeros((1, -(-len(TOKENS) // 32)), np.uint32)
        for _ in range(600):
            backend.fill([matcher], bits)
            allowed = np.flatnonzero(np.unpackbits(bits.view(np.uint8), bitorder="little")[: len(TOKENS)])
            plain = [t for t in allowed if t == END or TOKENS[t].isascii() and (len(TOKENS[t]) > 1 or t > 31)]
            token = int(draw.choice(plain or list(allowed)))
            if END in allowed and draw.random() < 0.7:
                token = END
            if token == END:
                break
            text += TOKENS[token]
            assert matcher.consume_token(token)
        else:
            continue
        whole += 1
        found = {}
        for piece in ToolCallParser(read_grammar(made)).push(text.decode(errors="replace")):
            assert not isinstance(piece, str), text
            name, arguments = found.get(piece.number, ("", ""))
            found[piece.number] = name or piece.name, arguments + piece.arguments
        assert found
        for name, arguments in found.values():
            jsonschema.validate(json.loads(arguments), WEATHER if name == "weather" else NOTHING)
    assert whole >= 5


UNIQUE = {
    "type": "object",
    "properties": {"a": {"type": "array", "uniqueItems": True, "items": {"type": "number"}}},
}


def test_an_unenforceable_schema_is_refused_or_noted(backend):
    with pytest.raises(
        InvalidRequest, match=r"^tools\[0\]\.function\.parameters: schema refused: uniqueItems at #"
    ):
        tool_calls([asked(UNIQUE)], ToolCalls("json", ()))
    for form, text in (
        ("json", '<tool_call>\n{"name": "weather", "arguments": {"a": [1, 1]}}\n</tool_call>'),
        (
            "xml",
            "<tool_call>\n<function=weather>\n<parameter=a>\n[1, 1]\n</parameter>\n</function>\n</tool_call>",
        ),
    ):
        made = tool_calls([asked(UNIQUE, is_strict=False)], ToolCalls(form, ()))
        assert read_grammar(made).unenforced == ("weather",)
        assert accepts(backend, made, text)
    with pytest.raises(InvalidRequest, match="type must be object, not 'array'"):
        tool_calls([asked({"type": "array"}, is_strict=False)], ToolCalls("json", ()))


@pytest.mark.parametrize(
    "schema",
    [
        {"properties": {"a": {}}, "anyOf": [{"required": ["a"]}, {"required": ["b"]}]},
        {"patternProperties": {"^x": {"type": "string"}}},
        {"properties": {"a>b": {}}},
    ],
)
def test_schemas_that_xml_calls_cannot_express_are_refused(schema):
    tool_calls([asked(schema)], ToolCalls("json", ()))
    with pytest.raises(InvalidRequest, match="this model's calls"):
        tool_calls([asked(schema)], ToolCalls("xml", ()))


def test_parameters_that_the_schema_does_not_name(backend):
    for others, value, other in (({"type": "string"}, 'a"b', None), ({"type": "integer"}, "7", "x")):
        made = tool_calls([asked({"additionalProperties": others})], ToolCalls("xml", ()))
        text = "<tool_call>\n<function=weather>\n<parameter=k>\n{}\n</parameter>\n</function>\n</tool_call>"
        assert accepts(backend, made, text.format(value))
        assert other is None or not accepts(backend, made, text.format(other))
        pieces = ToolCallParser(read_grammar(made)).push(text.format(value))
        arguments = json.loads("".join(each.arguments for each in pieces))
        assert arguments == {"k": value if others["type"] == "string" else int(value)}
