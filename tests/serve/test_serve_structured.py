"""Tests structured answers from real models. Each answer that is not cut off matches its schema, with any
weights, temperature and batch, and after interruptions.
"""

import asyncio
import json
import threading
from dataclasses import dataclass
from typing import Annotated, Literal

import jsonschema
import msgspec
import pytest

from mmengine.build import build
from mmengine.config import EngineConfig
from mmengine.errors import InvalidRequest, MMEngineError, RequestFailed
from mmengine.serve.async_engine.async_engine import AsyncEngine
from mmengine.serve.batch.run_batch import run_batch
from mmengine.serve.engine.engine import Engine
from mmengine.serve.pipeline.pipeline import Pipeline
from mmengine.serve.prompt.options import Options, make_sampling
from mmengine.serve.prompt.prompt import Prompt
from mmengine.serve.text.request_output import CUT
from mmengine.structured_output.request.spec import grammar_of
from tests.serve.queued_batch import answers_at_once
from tests.structured.strategies import random_schemas

pytest.importorskip("mmengine_shapes")

RECORD = {
    "type": "object",
    "properties": {
        "shape": {"enum": ["circle", "square", "triangle", "größe"]},
        "count": {"type": "integer", "minimum": 0, "maximum": 12},
        "size": {"anyOf": [{"type": "number", "minimum": -1.5, "maximum": 2}, {"type": "null"}]},
        "note": {"type": "string", "maxLength": 6},
    },
    "required": ["count", "shape"],
    "additionalProperties": False,
}
TREE = {
    "$defs": {
        "node": {
            "type": "object",
            "properties": {
                "name": {"type": "string", "pattern": "^[a-c]{1,3}$"},
                "in": {"$ref": "#/$defs/node"},
            },
            "required": ["name"],
            "additionalProperties": False,
        }
    },
    "$ref": "#/$defs/node",
}
SCHEMAS = [
    RECORD,
    TREE,
    {"type": "array", "items": {"type": "boolean"}, "minItems": 2, "maxItems": 4},
    {"type": "string", "format": "date"},
    {"const": {"a": [1, "é\n"]}},
    {"type": "array", "prefixItems": [{"type": "integer"}, RECORD], "minItems": 2, "items": False},
    {"type": "integer", "multipleOf": 7, "minimum": 0, "maximum": 700},
]
QUESTIONS = ["What is a triangle?", "How many shapes are there?", "Describe a square, at length, in JSON."]
SMALL = {"max_num_seqs": 8, "token_budget": 24, "max_model_len": 256}


def form(schema):
    return {"type": "json_schema", "json_schema": {"schema": schema}}


def jobs(count, temperature, max_tokens, seed=0, schemas=SCHEMAS):
    """Yield (schema, options). Every eighth request has no schema."""
    for number in range(count):
        schema = None if number % 8 == 7 else schemas[(number - number // 8) % len(schemas)]
        asked = {"max_tokens": max_tokens, "temperature": temperature, "seed": seed + number}
        sampling = make_sampling(asked | {"top_k": number % 3 * 20})
        yield schema, Options(sampling, grammar=None if schema is None else grammar_of(form(schema)))


def answers(engine, asked):
    prompts = [Prompt.of(QUESTIONS[number % 3]) for number in range(len(asked))]
    return answers_at_once(engine, zip(prompts, (options for _, options in asked), strict=True))


def check(asked, answered):
    """Check that each stopped answer matches its schema. Return the number of stopped answers."""
    stopped = 0
    for number, (schema, _) in enumerate(asked):
        choice = answered[number].choices[0]
        assert choice.finish_reason in ("stop", "length"), choice.detail
        if schema is not None and choice.finish_reason == "stop":
            value = json.loads(choice.text)
            jsonschema.validate(value, schema, jsonschema.Draft202012Validator, format_checker=FORMATS)
            stopped += 1
        elif schema is not None:
            assert choice.detail == CUT
    return stopped


FORMATS = jsonschema.Draft202012Validator.FORMAT_CHECKER


@pytest.mark.parametrize("temperature", [0.0, 1.5])
@pytest.mark.parametrize("weights", ["trained", "random"])
def test_stopped_answers_are_valid_with_any_pool(weights, temperature, random_weights):
    """Preemption, chunked prefill, swapping and overlapping steps do not change the tokens."""
    model = random_weights if weights == "random" else None
    check_pools(model, temperature, list(jobs(21, temperature, 100, schemas=SCHEMAS + random_schemas(14))))


@pytest.mark.soak
@pytest.mark.parametrize("temperature", [0.0, 1.5])
@pytest.mark.parametrize("weights", ["trained", "random"])
def test_many_stopped_answers_are_valid(weights, temperature, random_weights):
    model = random_weights if weights == "random" else None
    check_pools(model, temperature, list(jobs(571, temperature, 150, schemas=random_schemas(500))))


def check_pools(model, temperature, asked):
    with Engine(model, dtype="float32") as engine:
        wide = answers(engine, asked)
    settings = {"max_in_flight": 2} if temperature else {"swap_blocks": 40, "preempt_mode": "swap"}
    config = EngineConfig(num_blocks=19, **SMALL, **settings)
    with Engine(model, dtype="float32", config=config) as engine:
        narrow = answers(engine, asked)
        preempted = engine.stats().num_preemptions
    stopped, bound = check(asked, wide), sum(schema is not None for schema, _ in asked)
    print(
        f"{model or 'trained'}, temperature {temperature}: {stopped} of {bound} stop, {preempted} preemptions"
    )
    assert 4 * stopped >= bound and preempted > 0
    for number, (schema, _) in enumerate(asked):
        assert narrow[number].token_ids == wide[number].token_ids, schema
        assert narrow[number].finish_reason == wide[number].finish_reason


def test_answers_without_a_form_are_unaffected():
    # Requests without a schema have the same tokens with and without structured requests in the batch.
    asked = list(jobs(16, 1.0, 40))
    with Engine() as engine:
        mixed = answers(engine, asked)
        prompts = [Prompt.of(QUESTIONS[number % 3]) for number in range(16)]
        free = [number for number, (schema, _) in enumerate(asked) if schema is None]
        alone = dict(run_batch(engine, ((prompts[number], asked[number][1]) for number in free)))
    assert len(free) == 2
    assert [mixed[number].token_ids for number in free] == [alone[k].token_ids for k in range(2)]


def test_json_as_a_value_and_where_it_is_cut():
    # `generate_json` returns the decoded value, and raises if the answer is cut off.
    with Engine() as engine:
        value = engine.generate_json(QUESTIONS[0], RECORD)
        jsonschema.validate(value, RECORD)
        with pytest.raises(RequestFailed, match="incomplete after 3 tokens; raise max_tokens. The"):
            engine.generate_json(QUESTIONS[0], RECORD, max_tokens=3)
        cut = engine.generate([QUESTIONS[0]], max_tokens=3, response_format=form(RECORD))[0]
        assert (cut.finish_reason, cut.choices[0].detail, cut.as_json()["detail"]) == ("length", CUT, CUT)
        free = engine.generate([QUESTIONS[0]], max_tokens=3)[0]
        assert free.finish_reason == "length" and "detail" not in free.as_json()
        for wrong in ({"n": 2}, {"grammar": {"regex": "a"}}, {"ignore_eos": True}):
            with pytest.raises(InvalidRequest):
                engine.generate_json(QUESTIONS[0], RECORD, **wrong)
        with pytest.raises(RequestFailed, match="leave the stop string out"):
            engine.generate_json(QUESTIONS[0], RECORD, stop="}")
        words = {"choice": ["yes", "no", "ça"]}
        found = engine.generate([QUESTIONS[0]], n=9, temperature=50.0, seed=1, grammar=words)[0]
        texts = {choice.text for choice in found.choices}
        assert len(texts) >= 2 and texts <= {"yes", "no", "ça"}


class Shape(msgspec.Struct, forbid_unknown_fields=True):
    name: Literal["circle", "square"]
    corners: Annotated[int, msgspec.Meta(ge=0, le=4)] = 0


@dataclass
class Pair:
    first: Shape
    rest: list[bool] | None


def test_types_in_and_values_of_them_out():
    # A Python type is a schema, and `generate_json` returns an instance of the type.
    with Engine() as engine:
        found = engine.generate_json("What?", Pair, temperature=1.5, seed=3)
        assert isinstance(found, Pair) and isinstance(found.first, Shape)
        text = engine.generate(["What?"], response_format=Shape)[0].text
        assert msgspec.json.decode(text, type=Shape).name in ("circle", "square")
        for wrong in (threading.Lock, 3, "json_object"):
            with pytest.raises(InvalidRequest):
                engine.generate(["What?"], response_format=wrong)


class Breaking:
    """A grammar whose matchers have an error from the start."""

    after, shortest = (), 0

    def __init__(self, compiled):
        self._compiled = compiled

    def closer(self, budget, reserve):
        return None

    def renew(self, error):
        return None

    def matcher(self):
        matcher = self._compiled.matcher()
        matcher.consume_tokens([0] * 9)
        assert matcher.is_error()
        return matcher


def test_a_matcher_that_breaks_ends_its_request_alone():
    def make(*given, **options):
        def compile_grammar(grammar):
            compiled = built.grammars.backend.compile(grammar)
            return Breaking(compiled) if "breaks" in grammar.source else compiled

        built = build(*given, compile_grammar=compile_grammar, **options)
        return built

    with Engine(builder=make) as engine:
        forms = [{"choice": [word]} for word in ("goes on", "breaks", "and on")]
        asked = [Options(make_sampling({}), grammar=grammar_of(grammar=form)) for form in forms]
        found = dict(run_batch(engine, ((Prompt.of("Say."), options) for options in asked)))
    assert "its grammar cannot continue: " in str(found[1].error())
    assert (found[0].text, found[2].text) == ("goes on", "and on")


def test_a_pipeline_and_many_callers():
    pipe = Pipeline(model=None, max_new_tokens=60)
    chat = [{"role": "user", "content": QUESTIONS[0]}]
    record = pipe(text=[chat, chat], response_format=form(RECORD), return_full_text=False)[1][0]
    jsonschema.validate(json.loads(record["generated_text"]), RECORD)
    pipe.close()

    async def ask():
        async with AsyncEngine() as engine:
            values = await asyncio.gather(
                *(engine.generate_json(QUESTIONS[0], RECORD, temperature=1.0, seed=seed) for seed in range(9))
            )
            async with engine.stream(QUESTIONS[1], response_format=form(RECORD)) as stream:
                pieces = [output.text async for output in stream]
            assert "".join(pieces) == stream.completion.text
            return [*values, json.loads(stream.completion.text)]

    for value in asyncio.run(ask()):
        jsonschema.validate(value, RECORD)


def test_a_grammar_that_hangs_its_compiler_fails_alone():
    """Two hanging compilations do not stop fifty good grammars. With four hanging compilations, new grammars
    are refused, and the engine is not ready.
    """
    ends = threading.Event()

    def compile_grammar(grammar):
        if "hang" in grammar.source:
            ends.wait(60)
        return compilers[-1](grammar)

    compilers = []

    def make(*given, **options):
        built = build(*given, compile_grammar=compile_grammar, **options)
        compilers.append(built.grammars.backend.compile)
        return built

    def hang(k):
        return Options(make_sampling({}), grammar=grammar_of(grammar={"choice": [f"hang {k}"]}))

    def say(options):
        return Prompt.of("Say."), options

    with Engine(config=EngineConfig(grammar_timeout_s=4), builder=make) as engine:
        good = [Options(make_sampling({}), grammar=grammar_of(form({"const": k}))) for k in range(50)]
        found = dict(run_batch(engine, map(say, [hang(0), *good[:25], hang(1), *good[25:]])))
        for index in (0, 26):
            assert "not compiled within 4 seconds (grammar_timeout_s)" in str(found.pop(index).error())
        assert sorted(int(answer.text) for answer in found.values()) == list(range(50))
        assert engine.readiness()
        for _, answer in run_batch(engine, map(say, [hang(2), hang(3)])):
            assert "not compiled within" in str(answer.error())
        assert "4 grammars have been compiling" in engine.readiness().reasons[0]
        with pytest.raises(MMEngineError, match="no new grammars"):
            engine.generate(["Say."], grammar={"choice": ["new"]})
        assert engine.generate_json("Say.", {"const": 3}) == 3  # cached
        ends.set()
        assert engine.is_idle


@pytest.mark.parametrize(
    ("asked", "says"),
    [
        ({"grammar": {"regex": "(a"}}, "unclosed group"),
        ({"grammar": {"lark": "start: x"}}, "unknown name"),
        ({"grammar": {"choice": []}}, "grammar.choice must be a list"),
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        ({"response_format": form({"type": "objec"})}, "objec"),
        ({"response_format": form({"type": "integer", "minimum": 3, "maximum": 2})}, "m"),
    ],
)
def test_an_invalid_form_does_not_affect_other_requests(asked, says):
    with Engine() as engine:
        with pytest.raises(MMEngineError) as refusal:
            engine.generate(["Say."], **asked)
        assert says in str(refusal.value) and "\n" not in str(refusal.value)
        assert engine.generate_json("Say.", {"const": 1}) == 1
