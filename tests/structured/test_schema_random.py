"""Test random schemas: valid instances are accepted, and accepted texts are valid."""

import json
import random

import jsonschema
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from mmengine.structured_output.json_schema.normalization import Bounds
from tests.structured.accepting import Grammar
from tests.structured.strategies import Case, cases

RANDOM = settings(
    max_examples=100,
    deadline=None,
    phases=[Phase.generate],
    suppress_health_check=list(HealthCheck),
    derandomize=True,
)


def validator(schema: dict) -> jsonschema.Draft202012Validator:
    return jsonschema.Draft202012Validator(
        schema, format_checker=jsonschema.Draft202012Validator.FORMAT_CHECKER
    )


@RANDOM
@given(cases(), st.data(), st.booleans())
def test_valid_instances_are_accepted(case: Case, data: st.DataObject, bounded: bool) -> None:
    grammar = Grammar(case.schema, Bounds() if bounded else Bounds.off())
    for _ in range(3):
        instance = data.draw(case.instances)
        validator(case.schema).validate(instance)
        text = json.dumps(instance, ensure_ascii=False)
        assert grammar.accepts(text), (text, grammar.text)


@RANDOM
@given(cases(), st.integers(0, 2**32), st.booleans())
def test_allowed_texts_are_valid(case: Case, seed: int, bounded: bool) -> None:
    grammar = Grammar(case.schema, Bounds() if bounded else Bounds.off())
    source = random.Random(seed)
    for _ in range(3):
        text = grammar.walk(source, 400)
        if text is not None:
            validator(case.schema).validate(json.loads(text))


@RANDOM
@given(cases(), cases(), st.data())
def test_an_instance_of_another_schema_is_accepted_only_if_valid(
    a: Case, b: Case, data: st.DataObject
) -> None:
    instance = data.draw(b.instances)
    valid = validator(a.schema).is_valid(instance)
    if not valid:
        assert not Grammar(a.schema).accepts(json.dumps(instance, ensure_ascii=False))
