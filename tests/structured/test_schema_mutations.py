"""Tests that each mutated schema is compiled, or refused with our own message. The shortest text of a
compiled grammar must be valid.
"""

import json
import random

import jsonschema
import pytest

from benchmarks.structured import structured_generations
from mmengine.errors import InvalidRequest
from mmengine.structured_output.request.spec import grammar_of
from tests.benchmarks.conftest import BENCHMARKS
from tests.structured.accepting import byte_backend
from tests.structured.mutations import mutated


def schemas():
    lines = (BENCHMARKS / "structured" / "coverage_schemas.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line)["schema"] for line in lines]


def check(backend, schema, validator_of, bounds):
    """Return whether the schema is compiled. Check the refusal, or the grammar's shortest text."""
    try:
        asked = {"type": "json_schema", "json_schema": {"schema": schema}, "bounds": bounds}
        compiled = backend.compile(grammar_of({**asked, "on_truncation": "close"}))
    except InvalidRequest as refusal:
        text = str(refusal)
        assert "\n" not in text and "panic" not in text and "backtrace" not in text, text
        return False
    said = bytes(compiled.closer(compiled.shortest).path)
    validate(validator_of(schema), json.loads(said))
    return True


def validate(validator, instance):
    try:
        validator.check_schema(validator.schema)
        error = next(validator.iter_errors(instance), None)
    except (jsonschema.SchemaError, jsonschema.exceptions._WrappedReferencingError, RecursionError):
        return  # Normalization accepts some schemas that the validator rejects or cannot process.
    assert error is None, (validator.schema, instance, error.message)


@pytest.fixture
def validator_of():
    """Return the generation benchmark's function that builds a schema's validator."""
    return structured_generations.validator_of


def check_seeds(seeds, validator_of):
    backend = byte_backend()
    found, compiled = schemas(), 0
    for seed in seeds:
        source = random.Random(seed)
        schema = mutated(source.choice(found), found, source)
        compiled += check(backend, schema, validator_of, {"ordered": 0} if seed % 2 else {})
    assert compiled > len(seeds) // 10


def test_a_schema_with_changes_makes_a_grammar_or_is_refused(validator_of):
    check_seeds(range(150), validator_of)


@pytest.mark.soak
@pytest.mark.parametrize("seeds", [range(1_000, 11_000), range(11_000, 21_000)], ids=str)
def test_many_schemas_with_changes_make_grammars_or_are_refused(validator_of, seeds):
    check_seeds(seeds, validator_of)
