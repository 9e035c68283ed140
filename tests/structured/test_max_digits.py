"""Test `max_digits`, which limits the digits in numbers without a limit in the schema."""

import json
import random
from typing import Any

import pytest

from mmengine.request import GrammarRequest
from mmengine.structured_output.engines.unlimited_numbers import MAX_HELD
from mmengine.structured_output.json_schema.normalization import Bounds, normalize_schema
from mmengine.structured_output.report.report import check_schema
from mmengine.structured_output.request.spec import draft_grammars_of, grammar_of
from mmengine.structured_output.request.tool_calls import RequestedTool, ToolCalls, tool_calls
from tests.structured.accepting import accepts, byte_backend

BACKEND = byte_backend()
MOST = 40
FULL = "7" * MOST
OPEN_OBJECT = {"type": "object", "properties": {"a": {"type": "string"}}}
# (schema, text); the text ends with a number that has the maximum number of digits.
LIMITED = [
    ({}, FULL),
    (True, "[" + FULL),
    ({"type": "object"}, '{"x":{"y":[-' + FULL),
    (OPEN_OBJECT, '{"a":"b","other":' + FULL),
    ({"type": "integer"}, "-" + FULL),
    ({"type": "integer", "minimum": 0}, FULL),
    ({"type": "integer", "minimum": -3}, FULL),
    ({"type": "integer", "exclusiveMinimum": 12}, FULL),
    ({"type": "integer", "maximum": 5}, "-" + FULL),
    ({"type": "integer", "maximum": -10}, "-" + FULL),
    ({"type": "number"}, FULL),
    ({"type": "number", "minimum": 0.5}, FULL),
    ({"type": ["integer", "null"]}, FULL),
    ({"anyOf": [{"type": "number"}, {"type": "string"}]}, FULL),
    ({"type": "array", "items": {"type": "integer"}}, "[1," + FULL),
    ({"type": "array", "contains": {"const": "x"}, "items": {"type": ["string", "integer"]}}, '["x",' + FULL),
    ({"$defs": {"n": {"type": "integer"}}, "type": "array", "items": {"$ref": "#/$defs/n"}}, "[" + FULL),
    ({"type": "object", "additionalProperties": {"type": "integer"}}, '{"k":' + FULL),
    ({"type": "object", "patternProperties": {"^x": {"type": "integer"}}}, '{"x1":' + FULL),
]
# (schema, text). The text has more than MOST digits in a row, but `max_digits` does not limit these digits.
UNLIMITED: list[tuple[Any, str]] = [
    ({"type": "string"}, '"' + "7" * 100 + '"'),
    ({"type": "string", "pattern": "^[0-9]{60}$"}, '"' + "7" * 60 + '"'),
    ({"type": "integer", "multipleOf": 7}, "7" * 60),
    ({"type": "object"}, '{"' + "7" * 60 + '":"' + "7" * 60 + '"}'),
    (OPEN_OBJECT, '{"a":"' + "7" * 60 + '"}'),
    ({"const": "7" * 60}, '"' + "7" * 60 + '"'),
]


def _matcher(schema: object, bounds: Bounds | None = None, max_digits: int | None = MOST) -> Any:
    text = normalize_schema(schema, bounds or Bounds()).text  # type: ignore[arg-type]
    return BACKEND.compile(GrammarRequest("json_schema", text, max_digits=max_digits)).matcher()


@pytest.mark.parametrize(("schema", "text"), LIMITED)
def test_only_the_end_follows_the_last_digit(schema: object, text: str) -> None:
    matcher = _matcher(schema)
    assert matcher.try_consume_tokens(list((text + "7").encode())) == len(text)
    unlimited = _matcher(schema, max_digits=0)
    assert unlimited.try_consume_tokens(list((text + "7").encode())) == len(text) + 1


@pytest.mark.parametrize(("schema", "text"), UNLIMITED)
def test_other_digits_are_not_counted(schema: object, text: str) -> None:
    assert accepts(_matcher(schema), text, end=256)


def test_fraction_and_exponent_have_the_maximum_too() -> None:
    """Without bounds.decimals, no other rule ends a fraction or an exponent."""
    for schema in ({}, {"type": "number"}):
        matcher = _matcher(schema, Bounds.off())
        for head in ("0.", "1e", "-1.5E-"):
            text = (head + FULL + "7").encode()
            assert matcher.deep_copy().try_consume_tokens(list(text)) == len(text) - 1


def test_limits_in_the_schema_take_precedence() -> None:
    assert accepts(_matcher({"type": "integer", "maximum": 10**6}), "1000000", end=256)
    matcher = _matcher({"type": "integer", "minimum": 10**12, "maximum": 10**17}, max_digits=3)
    assert accepts(matcher, "1000000000000", end=256)
    assert accepts(_matcher({"type": "integer", "minimum": 10**12}, max_digits=3), str(10**12), end=256)


def test_one_limit_keeps_its_values() -> None:
    """A schema with only a minimum or only a maximum allows the same short numbers with and without
    `max_digits`.
    """
    source = random.Random(4)
    texts = [
        f"{source.choice(['', '-'])}{source.randint(1, 10 ** source.randrange(1, 6))}" for _ in range(30)
    ]
    texts += [f"{text}.{source.randrange(100)}" for text in texts] + ["0", "0.0", "-1", "00", "1e3", "9.99"]
    for keyword in ("minimum", "exclusiveMinimum", "maximum", "exclusiveMaximum"):
        for limit in (0, 10, -10, 99.5, -0.01):
            for kind in ("integer", "number"):
                schema = {"type": kind, keyword: limit}
                counted, plain = _matcher(schema), _matcher(schema, max_digits=0)
                for text in texts:
                    assert accepts(counted, text, end=256) == accepts(plain, text, end=256), (schema, text)


def test_the_request_decides_before_the_engine() -> None:
    """None stands for the engine's setting, and 0 for no maximum."""
    form = {"type": "json_object"}
    for bounds, expected in ((None, None), ({"max_digits": 3}, 3), (False, 0), ({"max_digits": 0}, 0)):
        found = grammar_of({**form, **({} if bounds is None else {"bounds": bounds})})
        assert found is not None and found.max_digits == expected
    tag = {"structures": [{"begin": "<a>", "schema": {}, "end": "</a>"}], "triggers": ["<a>"]}
    found = grammar_of(None, {"structural_tag": {**tag, "bounds": {"max_digits": 5}}})
    assert found is not None and found.max_digits == 5


def test_draft_grammars_count_the_same_digits() -> None:
    found = grammar_of({"type": "json_object", "bounds": {"max_digits": 3}})
    assert found is not None
    for draft, head in zip(draft_grammars_of(found), ('{"a":123', '{"a": 123'), strict=True):
        matcher = BACKEND.compile(draft).matcher()
        assert matcher.try_consume_tokens(list((head + "4").encode())) == len(head)


@pytest.mark.parametrize("form", ["json", "xml"])
def test_arguments_of_calls_have_the_maximum(form: Any) -> None:
    parameters = {"type": "object", "properties": {"n": {"type": "integer"}, "id": {"type": "string"}}}
    parameters |= {"required": ["n", "id"], "additionalProperties": False}
    tool = RequestedTool("f", json.dumps(parameters).encode(), ("tools", 0), True)
    grammar = tool_calls([tool], ToolCalls(form, (), "required"))
    (note,) = BACKEND.notes(GrammarRequest(grammar.kind, grammar.source, max_digits=MOST))
    assert "at most 40 digits" in note.text
    matcher = BACKEND.compile(GrammarRequest(grammar.kind, grammar.source, max_digits=MOST)).matcher()
    head = '<tool_call>\n{"name": "f", "arguments": {"n": '
    if form == "xml":
        head = "<tool_call>\n<function=f>\n<parameter=n>\n"
    assert matcher.try_consume_tokens(list((head + FULL + "7").encode())) == len(head + FULL)
    between = ', "id": "' if form == "json" else "\n</parameter>\n<parameter=id>\n"
    assert matcher.try_consume_tokens(list((between + "7" * 60).encode())) == len(between) + 60


def test_the_notes_name_the_maximum() -> None:
    def notes(schema: object, max_digits: int = MOST) -> list[str]:
        text = normalize_schema(schema).text  # type: ignore[arg-type]
        return [
            note.text for note in BACKEND.notes(GrammarRequest("json_schema", text, max_digits=max_digits))
        ]

    (text,) = notes({"type": "integer"})
    assert text.startswith("numbers without a maximum or multipleOf have at most 40 digits")
    assert notes({"type": "object"}) and not notes({"type": "integer"}, max_digits=0)
    assert not notes(
        {"type": "object", "properties": {"a": {"type": "string"}}, "additionalProperties": False}
    )
    assert not notes({"enum": [1, 2]})
    assert any("40 digits" in note.text for note in check_schema({"type": "integer"}).bounds)
    assert not check_schema({"type": "integer"}, bounds=Bounds.off()).bounds


def test_an_object_with_one_unnamed_key_is_written_in_lark() -> None:
    """After an additional key, no second additional key may follow. The grammar must express this rule
    without the repetition {0,0}, which the engine's Lark refuses.
    """
    schema = {
        "type": "object",
        "properties": {"a": {"type": "integer"}},
        "required": ["a"],
        "maxProperties": 2,
    }
    matcher = _matcher(schema)
    assert accepts(matcher, '{"a":1,"b":2}', end=256)
    assert not accepts(matcher, '{"a":1,"b":2,"c":3}', end=256)


def test_a_note_names_a_schema_that_is_too_long_to_count_in() -> None:
    """A schema with more than MAX_HELD (65,536) characters is not rewritten to limit its digits."""
    names = {f"{number:04}" + "x" * 60: {"type": "integer"} for number in range(900)}
    text = normalize_schema({"type": "object", "properties": names}).text
    assert len(text) > MAX_HELD
    (note,) = BACKEND.notes(GrammarRequest("json_schema", text, max_digits=MOST))
    assert f"{MAX_HELD:,} characters" in note.text and "max_digits does not limit" in note.text
    assert not BACKEND.notes(GrammarRequest("json_schema", text, max_digits=0))
    plain = normalize_schema({"enum": ["x" * MAX_HELD]}).text
    assert not BACKEND.notes(GrammarRequest("json_schema", plain, max_digits=MOST))
