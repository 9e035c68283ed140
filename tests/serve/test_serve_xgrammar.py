"""Tests the engine with xgrammar instead of llguidance: answers are valid, and a slow grammar fails only its
own request.
"""

import json
import sys

import jsonschema
import pytest

from mmengine.config import EngineConfig
from mmengine.errors import ConfigError, MMEngineError
from mmengine.serve.batch.run_batch import run_batch
from mmengine.serve.engine.engine import Engine
from mmengine.serve.prompt.options import Options, make_sampling
from mmengine.serve.prompt.prompt import Prompt
from mmengine.structured_output.request.spec import grammar_of
from tests.cli.cli_process import call_cli, run_cli
from tests.serve.queued_batch import answers_at_once
from tests.serve.test_serve_structured import SMALL
from tests.structured.strategies import random_schemas

pytest.importorskip("mmengine_shapes")
pytest.importorskip("xgrammar")
BOUNDS = {"string": 0, "key": 8}


def options_of(schema, number, bounds=BOUNDS):
    form = {"type": "json_schema", "json_schema": {"schema": schema}, "bounds": bounds}
    sampling = make_sampling({"max_tokens": 120, "temperature": number % 3 * 0.75, "seed": number})
    return Options(sampling, grammar=grammar_of(form))


def test_answers_that_end_are_what_their_schemas_describe():
    """Answers are greedy or sampled, with drafts, and the small block pool causes preemptions."""
    schemas = random_schemas(40)
    asked = [(Prompt.of("Say something."), options_of(schema, at)) for at, schema in enumerate(schemas)]
    config = EngineConfig(grammar_backend="xgrammar", num_blocks=24, **SMALL)
    counts = {"stop": 0, "length": 0, "refused": 0}
    with Engine(config=config) as engine:
        for index, answer in answers_at_once(engine, asked).items():
            if answer.error() is not None:
                assert "grammar_backend xgrammar" in str(answer.error())
                counts["refused"] += 1
                continue
            counts[answer.finish_reason] += 1
            if answer.finish_reason == "stop":
                jsonschema.validate(
                    json.loads(answer.text),
                    schemas[index],
                    jsonschema.Draft202012Validator,
                    format_checker=jsonschema.Draft202012Validator.FORMAT_CHECKER,
                )
        assert engine.stats().num_preemptions > 0
    print(counts)
    assert counts["stop"] >= 15 and counts["refused"] <= 10


def test_a_grammar_that_takes_too_long_fails_alone():
    """xgrammar needs many seconds to compile a text with 250,000 characters."""
    slow = Options(make_sampling({}), grammar=grammar_of(grammar={"choice": ["x" * 250_000]}))
    good = [options_of({"const": number}, number) for number in range(20)]
    asked = [(Prompt.of("Say."), each) for each in (good[0], slow, *good[1:])]
    with Engine(config=EngineConfig(grammar_backend="xgrammar", grammar_timeout_s=1)) as engine:
        found = dict(run_batch(engine, iter(asked)))
        assert "not compiled within 1 seconds (grammar_timeout_s)" in str(found.pop(1).error())
        assert sorted(int(answer.text) for answer in found.values()) == list(range(20))


def test_an_answer_has_a_note_where_keys_come_in_one_order_only():
    schema = {"type": "object", "properties": dict.fromkeys("abcde", {"type": "null"})}
    asked = {"response_format": {"type": "json_schema", "json_schema": {"schema": schema}, "bounds": BOUNDS}}
    found = []
    for name in ("xgrammar", "llguidance"):
        with Engine(config=EngineConfig(grammar_backend=name)) as engine:
            found.append(engine.generate(["Say."], max_tokens=2, **asked)[0].notes)
    assert ["at most 40 digits" in note.text for note in found[0]] == [False, True]
    assert ["at most 40 digits" in note.text for note in found[1]] == [True]
    assert "keys only in this order, other keys after them: a, b, c, d, e" in found[0][0].text


def test_fields_have_confidences():
    with Engine(config=EngineConfig(grammar_backend="xgrammar")) as engine:
        value, confidence = engine.generate_json("How many?", {"enum": [3, 4]}, confidence=True)
    (other,) = confidence[""].others
    assert other.value == 7 - value and 0 < confidence[""].p <= 1 - other.p + 1e-6


def test_a_schema_only_for_llguidance_does_not_affect_other_requests():
    with Engine(config=EngineConfig(grammar_backend="xgrammar")) as engine:
        with pytest.raises(MMEngineError, match=r"maxLength at #/properties/a/maxLength: "):
            engine.generate_json(
                "Say.", {"type": "object", "properties": {"a": {"type": "string", "maxLength": 4096}}}
            )
        assert engine.generate_json("Say.", {"const": 1}) == 1


def test_the_command_line_chooses_it(tmp_path, monkeypatch):
    (tmp_path / "schema.json").write_text('{"enum": [3, 4]}')
    asked = ("run", "How many?", "--schema", str(tmp_path / "schema.json"), "--grammar-backend")
    found = run_cli(*asked, "xgrammar", blocked=("llguidance",))
    assert found.returncode == 0 and json.loads(found.stdout) in (3, 4), found.stderr
    for name in [name for name in sys.modules if name.partition(".")[0] == "mmengine_xgrammar"]:
        monkeypatch.delitem(sys.modules, name)  # as in a process that has not loaded the plugin
    monkeypatch.setitem(sys.modules, "xgrammar", None)
    found = call_cli(*asked, "xgrammar")
    assert found.returncode == 2 and "pip install '.[xgrammar]'" in found.stderr.replace("\n", " ")


def test_another_name_is_refused():
    with pytest.raises(
        ConfigError, match="no grammar_backend 'outlines'; choose one of llguidance, xgrammar"
    ):
        Engine(config=EngineConfig(grammar_backend="outlines"))
