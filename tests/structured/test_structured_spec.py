"""Test accepted and refused values for response_format and grammar."""

import msgspec
import pytest

from mmengine.errors import InvalidRequest
from mmengine.request import GrammarRequest, SamplingParams
from mmengine.serve.prompt.options import Options
from mmengine.structured_output.request.spec import Choice, JsonSchema, Lark, Regex, grammar_of, read_grammar

SCHEMA = {"type": "object", "properties": {"b": {"type": "boolean"}, "a": {"const": "é"}}, "required": ["b"]}


def asked(schema, **others):
    return {"type": "json_schema", "json_schema": {"schema": schema, **others}}


def test_free_text_has_no_grammar():
    assert grammar_of() is None and grammar_of({"type": "text"}) is None


def test_a_schema_is_in_the_source_with_its_keys_in_their_order():
    grammar = grammar_of(asked(SCHEMA, strict=True, name="x"))
    found = read_grammar(grammar)
    assert isinstance(found, JsonSchema)
    assert list(msgspec.json.decode(found.schema)["properties"]) == ["b", "a"]
    assert grammar == grammar_of(asked(SCHEMA)) == grammar_of(asked(SCHEMA, strict=False))
    assert grammar.source is grammar_of(asked(SCHEMA)).source


def test_bounds_can_be_set_and_left_out():
    default = grammar_of({"type": "json_object"})
    assert default == grammar_of({"type": "json_object", "bounds": {}}) and "{1,32}" in default.source
    assert "{1,3}" in grammar_of({"type": "json_object", "bounds": {"whitespace": 3}}).source
    assert "whitespace_pattern" not in grammar_of({"type": "json_object", "bounds": False}).source


def test_json_object_is_a_schema():
    assert msgspec.json.decode(read_grammar(grammar_of({"type": "json_object"})).schema)["type"] == "object"


def test_grammars():
    assert read_grammar(grammar_of(grammar={"regex": r"\d+"})) == Regex(r"\d+")
    assert read_grammar(grammar_of(grammar={"lark": 'start: "é"'})) == Lark('start: "é"')
    assert read_grammar(grammar_of(grammar={"choice": ["b", "a", "b"]})) == Choice(("b", "a"))


@pytest.mark.parametrize(
    ("response_format", "grammar", "says"),
    [
        ({"type": "json"}, None, "response_format.type must be text, json_object, json_schema, struct"),
        ("json_object", None, "response_format must be an object"),
        ({"type": "json_object", "schema": {}}, None, "unknown field 'schema'"),
        ({"type": "json_schema"}, None, "response_format.json_schema must be an object"),
        ({"type": "json_schema", "json_schema": {}}, None, "must contain a schema"),
        (asked({}, strickt=True), None, "unknown field 'strickt'; supported: schema, strict"),
        (asked({}, strict="yes"), None, "strict must be true or false"),
        (asked({"const": float("nan")}), None, ""),
        (asked({"const": {1, 2}}), None, ""),
        (asked({"const": "\ud800"}), None, ""),
        (asked({"not": {"type": "string"}, "uniqueItems": True}), None, "schema refused: "),
        ({**asked({}), "bounds": {"strings": 3}}, None, "response_format.bounds cannot be used"),
        ({**asked({}), "bounds": {"string": -3}}, None, "response_format.bounds cannot be used"),
        ({**asked({}), "bounds": True}, None, "response_format.bounds cannot be used"),
        ({"type": "text", "bounds": {}}, None, "unknown field 'bounds'"),
        ({"type": "json_object"}, {"regex": "a"}, "not both"),
        (None, {}, "grammar must contain exactly one of regex, choice, lark"),
        (None, {"regex": "a", "lark": "b"}, "grammar must contain exactly one of"),
        (None, {"bnf": "a"}, "unknown field 'bnf'"),
        (None, "start", "grammar must be an object"),
        (None, {"regex": 3}, "grammar.regex must be a string"),
        (None, {"regex": "a" * 300_000}, "at most 262144 characters"),
        (None, {"lark": "\ud800"}, "unpaired surrogate at character 0"),
        (None, {"choice": []}, "grammar.choice must be a list of 1 to"),
        (None, {"choice": "abc"}, "grammar.choice must be a list"),
        (None, {"choice": ["a", 1]}, "grammar.choice[1] must be a string"),
        (None, {"choice": ["x" * 200_000, "y" * 200_000]}, "more than 262144 characters"),
    ],
)
def test_refused_requests(response_format, grammar, says):
    with pytest.raises(InvalidRequest) as refusal:
        grammar_of(response_format, grammar)
    assert says in str(refusal.value)


@pytest.mark.parametrize(
    ("kind", "source"),
    [
        *(("", ""), ("", "grammar"), ("no kind", "a"), ("json_schema", ""), ("json_schema", '{"a":')),
        *(("choice", "a"), ("choice", "[1]"), ("choice", "[" * 9999)),
        *(("structural_tag", "{}"), ("structural_tag", "[" * 9999)),
    ],
)
def test_any_source_in_a_log_is_read_or_refused(kind, source):
    with pytest.raises(InvalidRequest, match="the grammar cannot be read"):
        read_grammar(GrammarRequest(kind, source))


@pytest.mark.parametrize("ends", [{"stop_token_ids": (3,)}, {"ignore_eos": True}, {"min_tokens": 4}])
def test_other_end_conditions_are_refused(ends):
    Options(SamplingParams(**ends)).check()
    with pytest.raises(InvalidRequest, match=f"{next(iter(ends))} cannot go with a schema or a grammar"):
        Options(SamplingParams(**ends), grammar=GrammarRequest("regex", "a")).check()
