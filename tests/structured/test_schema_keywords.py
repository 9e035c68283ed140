"""Test each supported keyword with texts that its grammar accepts, and texts that it refuses."""

import pytest

from tests.structured.accepting import Grammar

NAMED = {"properties": {"a": {"type": "integer"}, "b": {"type": "string"}}}
CASES = [
    # keyword, schema, accepted, refused
    ("type", {"type": "integer"}, ["1", "-7", "0"], ["1.5", '"1"', "01", "true", ""]),
    ("type", {"type": ["null", "string"]}, ["null", '"x"'], ["1", "{}"]),
    ("boolean", True, ["null", "[1]", '{"a":{}}', "1.5e3"], ["nul", "{a:1}", "[1"]),
    ("const", {"const": {"a": [1, None]}}, ['{"a":[1,null]}'], ['{"a":[1]}', "{}", '{"a":[1,0]}']),
    ("const", {"const": 'a"\\\n'}, [r'"a\"\\\n"'], ['"a"']),
    ("enum", {"enum": [1, "1", None, [2]]}, ["1", '"1"', "null", "[2]"], ["2", "[]", "true"]),
    ("enum", {"enum": [True, 0]}, ["true", "0"], ["false", "1"]),
    ("enum", {"enum": ["abc", "x"], "minLength": 2}, ['"abc"'], ['"x"']),
    ("minimum", {"type": "integer", "minimum": -3, "maximum": 12}, ["-3", "12", "0"], ["-4", "13"]),
    ("minimum", {"type": "integer", "minimum": 0.5}, ["1", "99"], ["0", "-1"]),
    (
        "maximum",
        {"type": "number", "minimum": -2.5, "maximum": 10.75},
        ["10.7", "10", "-2.5"],
        ["10.76", "-2.51"],
    ),
    (
        "maximum",
        {"type": "number", "minimum": -10.75, "maximum": 10.05},
        ["-10.7", "10.0"],
        ["10.06", "10.1"],
    ),
    ("minimum", {"type": "number", "minimum": -483.732, "maximum": -394.4254}, ["-483.7"], ["-483.74"]),
    ("exclusiveMinimum", {"type": "number", "exclusiveMinimum": 0}, ["0.1", "5"], ["0", "-1", "0.0"]),
    ("exclusiveMaximum", {"type": "integer", "exclusiveMaximum": 3}, ["2", "-9"], ["3", "4"]),
    ("multipleOf", {"type": "integer", "multipleOf": 7}, ["14", "-7", "0"], ["15"]),
    ("multipleOf", {"type": "number", "multipleOf": 0.01}, ["0.3", "1.25", "2"], ["0.305"]),
    ("minLength", {"type": "string", "minLength": 2}, ['"ab"', '"日本"', '"\\n\\n"'], ['"a"', '""']),
    ("maxLength", {"type": "string", "maxLength": 2}, ['"ab"', '"😀😀"', '""'], ['"abc"', '"a\tb"']),
    ("maxLength", {"type": "string", "maxLength": 2.0}, ['"ab"'], ['"abc"']),
    ("pattern", {"type": "string", "pattern": "^a+$"}, ['"aa"'], ['""', '"ab"']),
    ("pattern", {"type": "string", "pattern": "foo"}, ['"afoob"'], ['"fo"']),
    ("pattern", {"type": "string", "pattern": "^a|b$"}, ['"ax"', '"xb"'], ['"xax"']),
    ("pattern", {"type": "string", "pattern": '^[^"]$'}, ['"x"', '"\\\\"', '"\\n"'], ['"\\""']),
    ("pattern", {"type": "string", "pattern": '^[^\\n"]*$'}, ['"x\\\\"'], ['"\\""', '"\\n"']),
    ("pattern", {"type": "string", "pattern": "^.$"}, ['"x"'], ['"\\r"', '"\u2028"', '"\\n"']),
    ("pattern", {"type": "string", "pattern": "^a", "allOf": [{"pattern": "b$"}]}, ['"ab"'], ['"a"', '"b"']),
    ("format", {"type": "string", "format": "date"}, ['"2024-02-29"'], ['"2023-02-29"', '"2024-2-1"']),
    ("format", {"type": "string", "format": "date"}, ['"2000-02-29"'], ['"1900-02-29"', '"0000-01-01"']),
    ("format", {"type": "string", "format": "time"}, ['"23:59:59Z"'], ['"24:00:00Z"', '"12:00:00"']),
    ("format", {"type": "string", "format": "hostname"}, ['"a-b.de"'], ['"-a"', '"xn--X"', '"a..b"']),
    ("format", {"type": "string", "format": "ipv6"}, ['"::1"', '"1::2:3"'], ['"1:::2"', '"12345::"']),
    ("format", {"type": "string", "format": "email"}, ['"a.b@c.de"'], ['"a"', '"a..b@c"', '".a@c"']),
    ("format", {"type": "string", "format": "uri"}, ['"https://a.b/c?d#e"'], ['"//a.b"', '"a b:c"']),
    (
        "format",
        {"type": "string", "format": "uri-reference"},
        ['"https://a.b/c?d#e"', '"//a.b/c"', '"/a"', '"a/b:c?d"', '"#x"', '""', '"mailto:a@b"'],
        ['"a b"', '"1a:b"', '"a\\\\b"', '"#a#b"', '"%1"'],
    ),
    (
        "format",
        {"type": "string", "format": "uri-template"},
        ['"http://a.de/{b}/é"', '"{?x,y*}"', '"{+a.b:12}"', '"%20"', '""'],
        ['"http://a.de/{"', '"a b"', '"{}"', '"{x:0}"', '"%2"', '"}"', '"{a b}"'],
    ),
    (
        "format",
        {"type": "string", "format": "relative-json-pointer"},
        ['"0"', '"12/a/~0"', '"1#"'],
        ['""', '"/a"', '"01"', '"-1"', '"0##"', '"1/~2"'],
    ),
    ("items", {"type": "array", "items": {"type": "integer"}}, ["[]", "[1,2]"], ['["a"]', "[1,]"]),
    ("prefixItems", {"type": "array", "prefixItems": [{"type": "null"}]}, ["[]", "[null,1]"], ["[1]"]),
    ("items", {"type": "array", "prefixItems": [True], "items": False}, ["[1]", "[]"], ["[1,2]"]),
    ("minItems", {"type": "array", "minItems": 1, "maxItems": 2}, ["[1]", "[1,2]"], ["[]", "[1,2,3]"]),
    ("uniqueItems", {"type": "array", "uniqueItems": False}, ["[1,1]"], []),
    ("uniqueItems", {"type": "array", "uniqueItems": True, "maxItems": 1}, ["[1]"], ["[1,2]"]),
    ("contains", {"type": "array", "contains": True}, ["[1]"], ["[]"]),
    ("properties", {"type": "object", **NAMED}, ["{}", '{"a":1,"b":"x"}', '{"z":[]}'], ['{"a":"x"}']),
    ("properties", {"type": "object", **NAMED}, [], ['{"\\u0061":"x"}', '{"a":1,"a":"x"}', '{"b":1}']),
    (
        "properties",
        {"type": "object", "properties": {'f"b': {"type": "null"}}},
        ['{"f\\"b":null}'],
        ['{"f\\"b":1}'],
    ),
    ("properties", {"type": "object", "properties": {"a": False}}, ["{}", '{"b":1}'], ['{"a":1}']),
    ("required", {"type": "object", **NAMED, "required": ["b"]}, ['{"b":"x"}'], ["{}", '{"a":1}']),
    ("required", {"type": "object", "required": ["z"]}, ['{"z":1}'], ["{}", '{"y":1}']),
    (
        "additionalProperties",
        {"type": "object", **NAMED, "additionalProperties": False},
        ['{"a":1}'],
        ['{"c":1}'],
    ),
    (
        "additionalProperties",
        {"type": "object", **NAMED, "additionalProperties": {"type": "null"}},
        ['{"a":1,"c":null}', '{"é":null}'],
        ['{"c":1}', '{"\\u0061":null}'],
    ),
    (
        "patternProperties",
        {"type": "object", "patternProperties": {"^x-": {"type": "integer"}}, "additionalProperties": False},
        ['{"x-a":1}', "{}"],
        ['{"x-a":"b"}', '{"y":1}'],
    ),
    (
        "patternProperties",
        {"type": "object", "patternProperties": {"^x-": {"type": "integer"}}},
        ['{"x-a":1}', '{"y":"z"}', '{"x":"z"}'],
        ['{"x-a":"b"}', '{"\\u0078-a":"b"}'],
    ),
    (
        "patternProperties",
        {"type": "object", "patternProperties": {"\\d": {"type": "integer"}}},
        ['{"a1":1}', '{"y":"z"}'],
        ['{"a1":"b"}', '{"\\u0031":"b"}'],
    ),
    (
        "patternProperties",
        {
            "type": "object",
            "properties": {"xa": {"minimum": 3}},
            "patternProperties": {"^x": {"type": "integer"}},
        },
        ['{"xa":3}', '{"xb":1}'],
        ['{"xa":2}', '{"xa":"s"}', '{"xb":"s"}'],
    ),
    ("minProperties", {"type": "object", "minProperties": 1}, ['{"a":1}'], ["{}"]),
    ("minProperties", {"type": "object", **NAMED, "minProperties": 1}, ['{"b":"x"}', '{"c":1}'], ["{}"]),
    (
        "minProperties",
        {"type": "object", **NAMED, "minProperties": 2, "additionalProperties": False},
        ['{"a":1,"b":"x"}'],
        ["{}", '{"a":1}'],
    ),
    ("maxProperties", {"type": "object", "maxProperties": 1}, ["{}", '{"a":1}'], ['{"a":1,"b":2}']),
    (
        "maxProperties",
        {"type": "object", **NAMED, "maxProperties": 1, "additionalProperties": False},
        ["{}", '{"a":1}', '{"b":"x"}'],
        ['{"a":1,"b":"x"}'],
    ),
    ("propertyNames", {"type": "object", "propertyNames": False}, ["{}"], ['{"a":1}']),
    (
        "patternProperties",
        {"type": "object", "patternProperties": {"^a": {"type": "null"}, "^a/b": {"type": "string"}}},
        ['{"a":null,"x":1}', '{"b":2}'],
        ['{"a/b":null}', '{"a/b":"x"}', '{"a":1}'],
    ),
    (
        "patternProperties",
        {"type": "object", "patternProperties": {"^ab": False, "^a": True}, "additionalProperties": False},
        ['{"a":1,"ac":2}'],
        ['{"ab":1}', '{"b":1}'],
    ),
    (
        "maxProperties",
        {"type": "object", "properties": {"a": True, "b": True}, "maxProperties": 2},
        ['{"a":1,"b":2}', '{"b":1,"x":2}', '{"x":1,"y":2}', "{}"],
        ['{"a":1,"b":2,"x":3}', '{"a":1,"x":2,"y":3}', '{"x":1,"y":2,"z":3}'],
    ),
    (
        "dependentRequired",
        {"type": "object", "dependentRequired": {"a": ["b"]}},
        ['{"a":1,"b":2}', '{"b":1}'],
        ['{"a":1}'],
    ),
    (
        "dependentSchemas",
        {"type": "object", **NAMED, "dependentSchemas": {"a": {"properties": {"b": {"const": "x"}}}}},
        ['{"a":1,"b":"x"}', '{"b":"y"}'],
        ['{"a":1,"b":"y"}'],
    ),
    (
        "unevaluatedProperties",
        {"type": "object", **NAMED, "unevaluatedProperties": False},
        ['{"a":1}'],
        ['{"c":1}'],
    ),
    (
        "anyOf",
        {"anyOf": [{"type": "integer"}, {"type": "string"}], "minimum": 3},
        ["3", '"x"'],
        ["2", "null"],
    ),
    ("oneOf", {"oneOf": [{"type": "integer"}, {"type": "string"}]}, ["3", '"x"'], ["null"]),
    (
        "oneOf",
        {"oneOf": [{"const": 1}, {"const": 2}, {"minimum": 5, "type": "number"}]},
        ["1", "2", "6"],
        ["3"],
    ),
    (
        "oneOf",
        {
            "oneOf": [
                {
                    "type": "object",
                    "properties": {"k": {"const": tag}, tag: {"type": "null"}},
                    "required": ["k"],
                }
                for tag in ("x", "y")
            ]
        },
        ['{"k":"x","x":null}', '{"k":"y","x":1}'],
        ['{"k":"x","x":1}', '{"k":"z"}', "{}"],
    ),
    (
        "allOf",
        {"allOf": [{"type": "integer"}, {"minimum": 3}, {"maximum": 5}]},
        ["3", "5"],
        ["2", "6", '"x"'],
    ),
    (
        "allOf",
        {
            "type": "object",
            "allOf": [{"properties": {"a": {"minimum": 2}}}, {"properties": {"a": {"type": "integer"}}}],
        },
        ['{"a":2}', "{}"],
        ['{"a":1}', '{"a":2.5}'],
    ),
    (
        "allOf",
        {
            "allOf": [
                {"type": "object", **NAMED, "additionalProperties": False},
                {"required": ["a"], "properties": {"c": True}},
            ]
        },
        ['{"a":1}', '{"a":1,"b":"x"}'],
        ['{"a":1,"c":1}', '{"b":"x"}'],
    ),
    ("not", {"not": {"type": ["string", "object"]}}, ["1", "null", "[]"], ['"x"', "{}"]),
    ("if", {"type": "integer", "if": {"minimum": 3}}, ["1"], []),
    ("if", {"if": True, "then": {"type": "null"}, "else": {"type": "string"}}, ["null"], ['"x"']),
    ("$ref", {"$ref": "#/$defs/a", "$defs": {"a": {"type": "null"}}}, ["null"], ["1"]),
    ("$ref", {"$ref": "#/$defs/a~1b%25", "$defs": {"a/b%": {"type": "null"}}}, ["null"], ["1"]),
    ("$ref", {"$ref": "#/$defs/a", "minimum": 2, "$defs": {"a": {"type": "integer"}}}, ["2"], ["1", "null"]),
    ("$anchor", {"$ref": "#x", "$defs": {"a": {"$anchor": "x", "type": "null"}}}, ["null"], ["1"]),
    (
        "$id",
        {"$id": "https://x.org/root", "$ref": "part", "$defs": {"p": {"$id": "part", "type": "null"}}},
        ["null"],
        ["1"],
    ),
    (
        "recursion",
        {"type": "object", "properties": {"next": {"$ref": "#"}}, "additionalProperties": False},
        ["{}", '{"next":{"next":{}}}'],
        ['{"next":1}', '{"next":{"n":1}}'],
    ),
    (
        "recursion",
        {
            "$ref": "#/$defs/n",
            "$defs": {
                "n": {
                    "type": "object",
                    "properties": {"v": {"type": "integer"}, "n": {"$ref": "#/$defs/n", "required": ["v"]}},
                }
            },
        },
        ['{"n":{"v":1,"n":{"v":2}}}', "{}"],
        ['{"n":{}}', '{"n":{"v":"x"}}'],
    ),
    (
        "annotations",
        {"type": "null", "title": "t", "examples": [1], "$comment": "c", "deprecated": True},
        ["null"],
        ["1"],
    ),
]


@pytest.mark.parametrize(("keyword", "schema", "accepted", "refused"), CASES)
def test_keyword(keyword: str, schema: dict, accepted: list[str], refused: list[str]) -> None:
    grammar = Grammar(schema)
    assert [text for text in accepted if not grammar.accepts(text)] == [], (keyword, grammar.text)
    assert [text for text in refused if grammar.accepts(text)] == [], (keyword, grammar.text)


def test_five_thousand_values() -> None:
    values = [f"value {at}" for at in range(5_000)]
    grammar = Grammar({"type": "object", "properties": {"v": {"enum": values}}, "required": ["v"]})
    assert grammar.accepts('{"v":"value 4999"}') and not grammar.accepts('{"v":"value 5000"}')


def test_numbers_against_decimals() -> None:
    """Test each range with two-decimal numbers inside and outside the range."""
    for low, high in [
        (-2.5, 10.75),
        (2, 2.5),
        (-2.5, -2),
        (0, 0.5),
        (-0.5, 0),
        (0, 0.07),
        (-0.25, 0),
        (9.5, 10.05),
        (-12.34, -1.1),
        (99.9, 100.01),
        (0.5, 0.5),
    ]:
        for closed in (True, False) if low < high else (True,):
            names = ("minimum", "maximum") if closed else ("exclusiveMinimum", "exclusiveMaximum")
            grammar = Grammar({"type": "number", names[0]: low, names[1]: high})
            for hundredths in range(
                round(low * 100) - 30, round(high * 100) + 30, 1 if high - low < 3 else 7
            ):
                value = hundredths / 100
                inside = low <= value <= high if closed else low < value < high
                assert grammar.accepts(repr(value)) == inside, (low, high, closed, value)


def test_the_same_input_gives_the_same_text() -> None:
    schema = {"type": "object", "properties": {name: {"enum": [name, 1, None]} for name in "zyx"}}
    assert len({Grammar(schema).text for _ in range(3)}) == 1
