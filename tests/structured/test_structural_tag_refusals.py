"""Tests refused structural tags. The errors name the field and, for a schema, the keyword and its JSON
pointer.
"""

import re

import pytest

from mmengine.errors import InvalidRequest
from mmengine.structured_output.request.spec import grammar_of
from tests.structured.accepting import byte_backend

FUNCTIONS = {
    "structures": [{"begin": "<function=a>", "schema": {"type": "object"}, "end": "</function>"}],
    "triggers": ["<function="],
}


def one(**changes):
    return {"begin": "<f>", "schema": {"type": "object"}, "end": "</f>", **changes}


def tags(*structures, triggers=("<f",), **others):
    return {"structures": list(structures), "triggers": list(triggers), **others}


@pytest.mark.parametrize(
    ("asked", "says"),
    [
        ([], "structural_tag must be an object, not []"),
        ({"type": "triggered", **FUNCTIONS}, "structural_tag.type must be structural_tag, not 'triggered'"),
        ({**FUNCTIONS, "format": {}}, "unknown field 'format'; supported: type, structures"),
        ({"structures": FUNCTIONS["structures"]}, "structural_tag.triggers must be a list of 1 to 32"),
        ({"triggers": ["<f"]}, "structural_tag.structures must be a list of 1 to 128"),
        (tags(triggers=["<f"]), "structural_tag.structures must be a list of 1 to 128"),
        (tags(one(), triggers=[]), "structural_tag.triggers must be a list of 1 to 32"),
        (tags(*[one(begin=f"<f{n}>") for n in range(129)]), "structures must be a list of 1 to 128"),
        (tags(one(), triggers=[f"t{n:02}" for n in range(33)]), "triggers must be a list of 1 to 32"),
        (tags("<f>"), "structures[0] must be an object, not '<f>'"),
        (tags(one(), one(begin="<fg>", name="g")), "structures[1] has the unknown field 'name'"),
        (tags(one(), {"begin": "<fg>", "end": "x"}), "structures[1] must contain a schema"),
        (tags(one(), {"begin": "<fg>", "schema": {}}), "structures[1].end must be a string"),
        (tags(one(begin="")), "structures[0].begin must not be empty"),
        (tags(one(begin=3)), "structures[0].begin must be a string of at most 1000 characters"),
        (
            tags(one(begin="<f" + "x" * 999)),
            "structures[0].begin must be a string of at most 1000 characters",
        ),
        (tags(one(begin="<f\ud800")), "structures[0].begin holds an unpaired surrogate at character 2"),
        (tags(one(end="\udc00")), "structures[0].end holds an unpaired surrogate at character 0"),
        (tags(one(), triggers=["<f", ""]), "triggers[1] must not be empty"),
        (tags(one(), triggers=["<f", 3]), "triggers[1] must be a string"),
        (
            tags(one(), triggers=["<f>", "<f"]),
            "triggers[1], '<f', is in triggers[0], '<f>', so that one could",
        ),
        (tags(one(), triggers=["<f", "<f"]), "triggers[0], '<f', is in triggers[1], '<f'"),
        (
            tags(one(), one(begin="a<fg"), triggers=["<f", "a<f"]),
            "triggers[0], '<f', is in triggers[1], 'a<f'",
        ),
        (tags(one(), triggers=["<f", "<g"]), "triggers[1], '<g', starts no structure; leave it out"),
        (tags(one(), one(begin="<g>")), "structures[1].begin, '<g>', starts with none of the triggers"),
        (tags(one(), one(begin="x<f>")), "structures[1].begin, 'x<f>', starts with none of the triggers"),
        (
            tags(one(), one()),
            "structures[0].begin, '<f>', also begins structures[1], so an answer could mean either",
        ),
        (tags(one(begin="<fg>h"), one(begin="<f")), "structures[1].begin, '<f', also begins structures[0]"),
        (
            tags(one(schema={"type": "number"}, end="")),
            "structures[0].end does not show where a number",
        ),
        (
            tags(one(schema={"enum": ["a", 1]}, end="0")),
            "structures[0].end does not show where a number",
        ),
        (
            tags(one(schema=True, end="")),
            "structures[0].end does not show where a number ends",
        ),
        (tags(one(), at_least_one=1), "structural_tag.at_least_one must be true or false"),
        (tags(one(), stop_after_first="no"), "structural_tag.stop_after_first must be true or false"),
        (tags(one(), bounds={"strings": 1}), "structural_tag.bounds cannot be used"),
        (
            tags(one(), one(begin="<fg>", schema={"properties": {"a": {"not": {"multipleOf": 2}}}})),
            "structures[1]: schema refused: not at #/properties/a/not: ",
        ),
        (tags(one(schema={"type": "objec"})), "structures[0]: schema refused: type at #/type: "),
        (tags(one(schema={"$ref": "#/$defs/x"})), "structures[0]: schema refused: $ref at #/$ref: "),
        (
            tags(one(schema=[])),
            "structures[0]: schema refused: at #: a schema must be an object, true or false",
        ),
        (tags(one(schema={"const": float("nan")})), "structures[0]: schema refused: at #: "),
    ],
)
def test_refused_tags(asked, says):
    with pytest.raises(InvalidRequest) as refusal:
        grammar_of(grammar={"structural_tag": asked})
    assert says in str(refusal.value) and len(str(refusal.value)) < 600
    assert str(refusal.value).startswith("grammar.structural_tag")
    if isinstance(asked, dict) and "type" not in asked:
        with pytest.raises(InvalidRequest, match=re.escape(f"response_format{str(refusal.value)[22:60]}")):
            grammar_of({"type": "structural_tag", **asked})


def test_schemas_that_are_too_large_together():
    schema = {"enum": ["x" * 900 + str(n) for n in range(1_500)]}
    asked = tags(*[one(begin=f"<f{n}>", schema=schema) for n in range(9)])
    with pytest.raises(
        InvalidRequest, match=r"structural_tag.structures: their schemas have more than 8,388,608 b"
    ):
        grammar_of(grammar={"structural_tag": asked})


@pytest.mark.parametrize("where", ["begin", "end", "trigger"])
def test_tags_must_not_contain_end_tokens(where):
    backend = byte_backend(None, b"<|end|>")
    asked = {
        "begin": tags(one(begin="<f<|end|>")),
        "end": tags(one(end="}<|end|>")),
        "trigger": tags(one(begin="<|end|><f"), triggers=["<|end|>"]),
    }[where]
    with pytest.raises(
        InvalidRequest, match=r"'<\|end\|>' ends an answer, so no structural tag may contain it"
    ):
        backend.compile(grammar_of(grammar={"structural_tag": asked}))
