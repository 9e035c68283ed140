"""Whatever is given as a schema: it makes a grammar or is refused in our words, soon; and the shortest text
that its grammar allows is valid."""

import json
import random
import time

import jsonschema
import pytest

from mmengine.errors import InvalidRequest
from mmengine.structured_output.request.spec import grammar_of
from tests.benchmarks.conftest import BENCHMARKS
from tests.structured.accepting import byte_backend
from tests.structured.mutations import mutated

MAX_S = 10.0  # from the schema to the grammar
DRAFTS = {
    "draft-03": jsonschema.Draft3Validator,
    "draft-04": jsonschema.Draft4Validator,
    "draft-06": jsonschema.Draft6Validator,
    "draft-07": jsonschema.Draft7Validator,
    "2019-09": jsonschema.Draft201909Validator,
}


def schemas():
    lines = (BENCHMARKS / "coverage_schemas.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line)["schema"] for line in lines]


def check(backend, schema):
    """Whether it makes a grammar."""
    begun = time.perf_counter()
    try:
        asked = {"type": "json_schema", "json_schema": {"schema": schema}, "on_truncation": "close"}
        compiled = backend.compile(grammar_of(asked))
    except InvalidRequest as refusal:
        text = str(refusal)
        assert "\n" not in text and "panic" not in text and "backtrace" not in text, text
        return False
    finally:
        assert time.perf_counter() - begun < MAX_S
    said = bytes(compiled.closer(compiled.shortest).path)
    validate(schema, json.loads(said))
    return True


def validate(schema, instance):
    named = str(schema.get("$schema", "")) if isinstance(schema, dict) else ""
    kind = next((each for name, each in DRAFTS.items() if name in named), jsonschema.Draft202012Validator)
    try:
        kind.check_schema(schema)
        error = next(kind(schema, format_checker=kind.FORMAT_CHECKER).iter_errors(instance), None)
    except (jsonschema.SchemaError, jsonschema.exceptions._WrappedReferencingError, RecursionError):
        return  # the gate may be more patient than the referee
    assert error is None, (schema, instance, error.message)


def check_seeds(seeds):
    backend = byte_backend()
    found, compiled = schemas(), 0
    for seed in seeds:
        source = random.Random(seed)
        compiled += check(backend, mutated(source.choice(found), found, source))
    assert compiled > len(seeds) // 10


def test_a_schema_with_changes_makes_a_grammar_or_is_refused():
    check_seeds(range(150))


@pytest.mark.soak
def test_many_schemas_with_changes_make_grammars_or_are_refused():
    check_seeds(range(1_000, 21_000))
