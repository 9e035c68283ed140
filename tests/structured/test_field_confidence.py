"""Test the fields of a JSON text: their spans, the values that the schema lists, and their confidences."""

import json
import math

import pytest
from msgspec import UNSET

from mmengine.structured_output.field_confidence import schema_values
from mmengine.structured_output.field_confidence.fields import field_confidences
from mmengine.structured_output.field_confidence.schema_values import has_keyword, values_at
from mmengine.structured_output.field_confidence.spans import MAX_DEPTH, value_spans
from mmengine.structured_output.json_pointer import join_pointer
from mmengine.structured_output.request.spec import grammar_of
from mmengine.token_confidence import TokenConfidence, pairs_of, split_entries

SAMPLES = [
    {"a": 1, "b/c": [True, None, 'x\\"y'], "~": {"é": -1.5e9, "": []}, "e": {}, "f": [[], [1, [2]]]},
    [],
    "alone",
    [[["deep"]], {"k": {"k": {"k": 0}}}],
    7,
    None,
]


def leaves(value, path=()):
    if isinstance(value, dict) and value:
        for key, each in value.items():
            yield from leaves(each, (*path, key))
    elif isinstance(value, list) and value:
        for index, each in enumerate(value):
            yield from leaves(each, (*path, index))
    else:
        yield path, value


@pytest.mark.parametrize("value", SAMPLES)
@pytest.mark.parametrize("style", [{}, {"indent": 2}, {"separators": (",", ":"), "ensure_ascii": False}])
def test_every_leaf_of_a_text_is_found_whole(value, style):
    text = json.dumps(value, **style).encode()
    for tail in (b"", b"\n", b" }]"):
        spans = list(value_spans(b" " + text + tail))
        found = [(span.path, json.loads((b" " + text)[span.start : span.end])) for span in spans]
        assert found == list(leaves(value))


def test_of_a_cut_text_only_complete_leaves_are_found():
    # A value whose end is missing may be left out, but no incomplete value is returned.
    whole = json.dumps(SAMPLES[0]).encode()
    all_spans = list(value_spans(whole))
    for size in range(len(whole)):
        spans = list(value_spans(whole[:size]))
        assert spans == all_spans[: len(spans)]
        missed = all_spans[len(spans) :]
        assert not missed or missed[0].end >= size or missed[0].end > size - 1


def test_very_deep_values_are_left_out():
    for depth, paths in ((MAX_DEPTH, [(0,) * MAX_DEPTH, (1,)]), (MAX_DEPTH + 1, [(1,)]), (5_000, [(1,)])):
        text = b"[" * depth + b"1" + b"]" * (depth - 1) + b", 2]"
        assert [span.path for span in value_spans(text)] == paths
    tree = json.dumps({"items": {"$ref": "#"}, "enum": [1], "x-mark": True})
    assert values_at(tree, (0,) * MAX_DEPTH) == [1] and has_keyword(tree, (0,) * MAX_DEPTH, "x-mark")
    assert values_at(tree, (0,) * 5_000) == [] and not has_keyword(tree, (0,) * 5_000, "x-mark")


def test_siblings_share_the_search_for_their_schemas(monkeypatch):
    # Separate searches for the 100 paths of 51 steps would call `_alternatives` about 5,100 times.
    searched, search = [], schema_values._alternatives
    monkeypatch.setattr(
        schema_values, "_alternatives", lambda root, schemas: searched.append(1) or search(root, schemas)
    )
    tree = json.dumps({"items": {"$ref": "#"}, "enum": [2]})
    for index in range(100):
        assert values_at(tree, (*[0] * 50, index)) == [2]
    assert len(searched) == 151


def test_pointers_escape_names():
    assert join_pointer("", "a/b", "m~n", 0, "") == "/a~1b/m~0n/0/" and join_pointer("") == ""


SCHEMA = {
    "type": "object",
    "properties": {
        "kind": {"enum": ["a", "b"]},
        "paid": {"type": "boolean"},
        "note": {"type": ["string", "null"]},
        "rows": {"type": "array", "items": {"$ref": "#/$defs/row"}},
        "pair": {"type": "array", "prefixItems": [{"const": 1}, {"type": "integer"}]},
        "free": {"type": "string"},
    },
    "$defs": {
        "row": {"type": "object", "properties": {"next": {"$ref": "#/$defs/row"}, "x": {"enum": [1, 2]}}}
    },
}


def test_the_values_that_a_schema_names():
    source = grammar_of({"type": "json_schema", "json_schema": {"schema": SCHEMA}}).source
    for path, values in (
        (("kind",), ["a", "b"]),
        (("paid",), [True, False]),
        (("note",), [None]),
        (("rows", 3, "x"), [1, 2]),
        (("rows", 0, "next", "next", "x"), [1, 2]),
        (("pair", 0), [1]),
        (("pair", 1), []),
        (("free",), []),
        (("none", 1, "x"), []),
    ):
        assert values_at(source, path) == values, path


def test_branches_with_the_same_schema_do_not_hide_another():
    digit = {"anyOf": [{"const": number} for number in range(20)]}
    same = [{"properties": {"x": {"$ref": "#/$defs/digit"}}} for _ in range(20)]
    schema = {"anyOf": [*same, {"properties": {"x": {"const": "none"}}}], "$defs": {"digit": digit}}
    assert values_at(json.dumps(schema), ("x",)) == [*range(20), "none"]
    endless = {"anyOf": [{"$ref": "#"}, {"items": {"$ref": "#"}}, {"const": 1}]}
    assert values_at(json.dumps(endless), (0,) * 50) == [1]


class Tokens:
    """A text's tokens, and the probabilities of the likely tokens at each position."""

    def __init__(self, *steps):
        self.pieces, self.ids, self.confidences = [], [], []
        for chosen, likely in steps:
            pairs = tuple((self.id_of(text), math.log(p)) for text, p in likely.items())
            token = self.id_of(chosen)
            self.ids.append(token)
            entropy = -sum(p * math.log(p) for p in likely.values())
            of_token = dict(pairs).get(token, 0.0)
            self.confidences.append(TokenConfidence(of_token, entropy, pairs))

    def id_of(self, text):
        if text not in self.pieces:
            self.pieces.append(text)
        return self.pieces.index(text)

    def fields(self, schema):
        source = json.dumps(schema)
        return field_confidences(
            source, self.ids, self.confidences, lambda token: self.pieces[token].encode()
        )


def others_of(field):
    return [
        (each.value if each.begins is UNSET else {"begins": each.begins}, round(each.p, 6))
        for each in field.others
    ]


def test_tokens_count_to_the_values_whose_bytes_they_contain():
    schema = {"properties": {"a": {"type": "integer"}, "b": {"enum": ["x", "xy", None]}}}
    tokens = Tokens(
        ('{"a', {}),
        ('":', {'":': 0.5, '":1': 0.25, '": ': 0.25}),
        ("1", {"1": 0.5, "2": 0.25, " ": 0.25}),
        ("2,", {"2,": 0.6, "2": 0.1, "3": 0.1, ",": 0.2}),
        ('"b', {}),
        ('":"', {'":"': 0.9, '":': 0.05, '":n': 0.05}),
        ("x", {}),
        ('"}', {'"}': 0.75, 'y"': 0.125, "y": 0.125}),
    )
    found = tokens.fields(schema)
    assert found.keys() == {"/a", "/b"}
    a, b = found["/a"], found["/b"]
    assert a.p == pytest.approx(0.5 * 0.6) and a.min == pytest.approx(0.5)
    assert a.entropy == pytest.approx(tokens.confidences[2].entropy)  # no byte of /a is in the previous token
    assert others_of(a) == [({"begins": "2"}, 0.25)]  # white space does not count as another value
    assert b.p == pytest.approx(0.9 * 0.75) and b.min == pytest.approx(0.75)
    assert b.entropy == pytest.approx(tokens.confidences[5].entropy)  # the likely token `":n` begins null
    assert others_of(b) == [("xy", 0.25), (None, 0.05)]


def test_a_number_ends_where_no_token_continues_it():
    tokens = Tokens(
        ("[", {}),
        ("1", {}),
        (",", {",": 0.6, "0": 0.2, ".": 0.1, "]": 0.1}),
        ("2", {"2": 0.5, "3": 0.5}),
        ("]", {"]": 0.01, ",": 0.99}),
    )
    found = tokens.fields({"items": {"enum": [1, 2, 3, 10]}})
    assert found["/0"].p == pytest.approx(0.7) == found["/0"].min
    assert found["/0"].entropy == pytest.approx(tokens.confidences[2].entropy)
    assert others_of(found["/0"]) == [(10, 0.2), (2, 0), (3, 0)]
    assert found["/1"].p == pytest.approx(0.5) and others_of(found["/1"]) == [(3, 0.5), (1, 0), (10, 0)]


def test_the_token_after_a_separator_is_not_the_number_s():
    tokens = Tokens(("[", {}), ("1,", {"1,": 1.0}), ("2", {"2": 0.5, "3": 0.5}), ("]", {"]": 1.0}))
    first = tokens.fields({"items": {"type": "integer"}})["/0"]
    assert (first.p, first.entropy, others_of(first)) == (1, 0, [])


def test_forced_values_and_containers_are_certain():
    tokens = Tokens(("{", {}), ('"a":', {}), ("[]", {"[]": 0.5, "[": 0.5}), (',"b":tr', {}), ("ue}", {}))
    found = tokens.fields({"properties": {"b": {"type": "boolean"}}})
    assert found["/a"].p == pytest.approx(0.5) and not others_of(found["/a"])
    assert (found["/b"].p, found["/b"].min, found["/b"].entropy) == (1, 1, 0)
    assert others_of(found["/b"]) == [(False, 0)]


def test_a_token_of_another_engine_leaves_its_field_out():
    tokens = Tokens(('["a",', {}), ('"b', {}), ('","c"]', {}))
    tokens.confidences[1] = None
    assert tokens.fields({}).keys() == {"/0", "/2"}


def test_pairs_carry_confidences_behind_logprobs():
    # A log entry holds a token's logprobs, followed by the token's confidence as pairs.
    confidence = TokenConfidence(-0.5, 1.25, ((0, -0.5), (7, -1.0)))
    forced = TokenConfidence(0.0, 0.0)
    entries = [((3, -1.0), (4, -2.0), *pairs_of(confidence)), ((5, -0.1), *pairs_of(forced))]
    logprobs, confidences = split_entries(entries)
    assert logprobs == [((3, -1.0), (4, -2.0)), ((5, -0.1),)] and confidences == [confidence, forced]
    assert split_entries([pairs_of(forced)]) == (None, [forced])
    assert split_entries([((3, -1.0),)]) == ([((3, -1.0),)], None)
    assert split_entries(None) == (None, None) and split_entries([]) == ([], None)
