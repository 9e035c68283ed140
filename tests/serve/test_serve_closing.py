"""Tests on_truncation "close", which completes an answer before its token budget ends.

Answers match their schemas with any weights, temperature and batch, and after interruptions.
"""

import itertools
import json

import jsonschema
import pytest

from mmengine.config import EngineConfig
from mmengine.core.resume import Resume
from mmengine.errors import InvalidRequest, RequestFailed
from mmengine.replay.verify import verify
from mmengine.serve.engine.engine import Engine
from mmengine.serve.prompt.options import Options, make_sampling
from mmengine.structured_output.request.spec import grammar_of
from tests.cli.cli_process import call_cli
from tests.log_copies import copied
from tests.serve.test_serve_structured import (
    FORMATS,
    QUESTIONS,
    RECORD,
    SCHEMAS,
    SMALL,
    TREE,
    answers,
    form,
)
from tests.structured.strategies import random_schemas

pytest.importorskip("mmengine_shapes")

LONG = {
    "type": "object",
    "properties": {
        "title": {"type": "string"},
        "points": {"type": "array", "items": {"type": "array", "items": {"type": "number"}, "minItems": 2}},
        "more": {"type": "object"},
    },
    "required": ["title", "points", "more"],
}
OTHER_FORMS = [
    ({"regex": "([a-z]+ )+[0-9]{3}"}, 60),
    ({"choice": ["a short one", "one that is much longer than the others are"]}, 30),
]


def closing(schema):
    return form(schema) | {"on_truncation": "close"}


def budgets(engine, schemas):
    """Return each schema's shortest answer length in tokens."""
    return [engine.built.grammars.backend.compile(grammar_of(closing(schema))).shortest for schema in schemas]


def closed_jobs(schemas, shortest, temperature, more):
    """Yield (schema, options) for each schema and each number in `more`. The token budget is the schema's
    shortest answer length plus the number.
    """
    for number, (schema, least) in enumerate(zip(schemas, shortest, strict=True)):
        for beyond in more:
            asked = {
                "max_tokens": least + beyond,
                "temperature": temperature,
                "seed": number + beyond,
                "repetition_penalty": 1.0 if number % 3 else 1.3,
                "top_k": number % 2 * 30,
            }
            yield schema, Options(make_sampling(asked), grammar=grammar_of(closing(schema)))


def check_closed(asked, answered):
    """Check all answers against their schemas, and return the number of answers that closing completed."""
    closed = 0
    for number, (schema, options) in enumerate(asked):
        choice = answered[number].choices[0]
        assert choice.finish_reason == "stop", (choice, schema)
        assert len(choice.token_ids) <= options.sampling.max_tokens
        value = json.loads(choice.text)
        jsonschema.validate(value, schema, jsonschema.Draft202012Validator, format_checker=FORMATS)
        closed += choice.detail == "closed"
        assert ("detail" in answered[number].as_json()) == (choice.detail == "closed")
    return closed


def check_pools(model, temperature, schemas, more):
    with Engine(model, dtype="float32") as engine:
        asked = list(closed_jobs(schemas, budgets(engine, schemas), temperature, more))
        wide = answers(engine, asked)
    settings = {"max_in_flight": 2} if temperature else {"swap_blocks": 40, "preempt_mode": "swap"}
    config = EngineConfig(num_blocks=19, **SMALL, **settings)
    with Engine(model, dtype="float32", config=config) as engine:
        narrow = answers(engine, asked)
        preempted = engine.stats().num_preemptions
    closed = check_closed(asked, wide)
    print(
        f"{model or 'trained'}, temperature {temperature}: {closed} of {len(asked)} closed, "
        f"{preempted} preemptions"
    )
    assert preempted > 0 and 0 < closed < len(asked)
    for number in range(len(asked)):
        assert narrow[number].token_ids == wide[number].token_ids
        assert narrow[number].choices[0].detail == wide[number].choices[0].detail


@pytest.mark.parametrize("temperature", [0.0, 1.5])
@pytest.mark.parametrize("weights", ["trained", "random"])
def test_closed_answers_are_valid_with_any_pool(weights, temperature, random_weights):
    model = random_weights if weights == "random" else None
    check_pools(model, temperature, [*SCHEMAS, LONG, *random_schemas(6)], (0, 1, 7, 40))


@pytest.mark.soak
@pytest.mark.parametrize("temperature", [0.0, 1.5])
@pytest.mark.parametrize("weights", ["trained", "random"])
def test_many_closed_answers_are_valid(weights, temperature, random_weights):
    model = random_weights if weights == "random" else None
    check_pools(model, temperature, [LONG, *random_schemas(120)], (0, 1, 3, 17, 60))


@pytest.mark.parametrize("budget", range(25, 60, 5))
def test_a_long_answer_is_closed_at_each_budget(budget):
    """The answer without a limit is longer than each budget."""
    with Engine() as engine:
        cut = engine.generate(
            [QUESTIONS[0]], max_tokens=budget, temperature=1.5, seed=2, response_format=form(LONG)
        )[0]
        whole = engine.generate(
            [QUESTIONS[0]], max_tokens=budget, temperature=1.5, seed=2, response_format=closing(LONG)
        )[0]
    jsonschema.validate(json.loads(whole.text), LONG)
    assert cut.finish_reason == "length" and whole.choices[0].detail == "closed"
    same = sum(
        1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(cut.token_ids, whole.token_ids))
    )
    assert len(whole.token_ids) <= budget and same >= budget - 25


def test_an_answer_that_ends_in_time_is_as_without():
    # If the model's answer ends within the budget, closing changes no token.
    with Engine() as engine:
        for schema in SCHEMAS:
            plain, close = (
                engine.generate([QUESTIONS[0]], max_tokens=200, response_format=make(schema))[0]
                for make in (form, closing)
            )
            if plain.finish_reason == "stop":
                assert (
                    close.token_ids == plain.token_ids and close.choices[0].detail == plain.choices[0].detail
                )


@pytest.mark.parametrize(("grammar", "budget"), OTHER_FORMS)
def test_forms_that_are_no_json_are_closed(grammar, budget):
    with Engine() as engine:
        answer = engine.generate(
            [QUESTIONS[0]] * 2,
            max_tokens=budget,
            temperature=2.0,
            seed=1,
            grammar=grammar | {"on_truncation": "close"},
        )[0]
    assert answer.finish_reason == "stop"


@pytest.mark.parametrize("end", ["</think>", "So"])
def test_reasoning_is_ended_in_time(end):
    """Reasoning ends early enough for the answer, also after preemptions."""
    found, asked = [], []
    for pool in ({}, {"num_blocks": 19, **SMALL}):
        with Engine(config=EngineConfig(reasoning_end=end, **pool)) as engine:
            marker = engine.processor.tokenizer.encode(end, allow_special=True)
            if not asked:
                for number, least in enumerate(budgets(engine, [RECORD, TREE, LONG] * 4)):
                    budget = least + len(marker) + (0, 1, 9, 60)[number % 4]
                    options = make_sampling({"max_tokens": budget, "temperature": 1.5, "seed": number})
                    schema = (RECORD, TREE, LONG)[number % 3]
                    text = grammar_of(closing(schema))
                    asked.append((schema, Options(options, grammar=text, reasoning=True)))
            found.append(answers(engine, asked))
    for number, (schema, options) in enumerate(asked):
        choice = found[0][number].choices[0]
        assert choice == found[1][number].choices[0]
        assert choice.finish_reason == "stop" and len(choice.token_ids) <= options.sampling.max_tokens
        jsonschema.validate(json.loads(choice.content), schema, format_checker=FORMATS)
    assert any(len(found[0][number].choices[0].reasoning) > 9 for number in range(len(asked)))


def test_a_budget_that_no_answer_fits_is_refused_before_the_model_runs():
    with Engine(config=EngineConfig(max_model_len=64)) as engine:
        least = budgets(engine, [RECORD])[0]
        with pytest.raises(RequestFailed, match=f"needs {least} tokens; the limit is {least - 1}: raise max"):
            engine.generate_json(QUESTIONS[0], RECORD, on_truncation="close", max_tokens=least - 1)
        assert engine.stats().num_output_tokens == 0
        value = engine.generate_json(QUESTIONS[0], RECORD, on_truncation="close", max_tokens=least)
        jsonschema.validate(value, RECORD)
        with pytest.raises(RequestFailed, match="the limit is [0-9]+: raise max_tokens or max_model_len"):
            engine.generate_json("what " * 24, RECORD, on_truncation="close")
        value = engine.generate_json("what " * 2, LONG, on_truncation="close", temperature=1.5, seed=1)
        jsonschema.validate(value, LONG)


def test_logprobs_are_the_models_own():
    """If closing replaces the model's choice, the logprob still comes from the model."""
    with Engine() as engine:
        asked = {"max_tokens": 34, "temperature": 1.5, "seed": 2, "logprobs": 5}
        answer = engine.generate([QUESTIONS[0]], response_format=closing(LONG), **asked)[0].choices[0]
    assert answer.detail == "closed" and len(answer.logprobs) == len(answer.token_ids)
    for token, pairs in zip(answer.token_ids, answer.logprobs, strict=True):
        assert pairs[0][0] == token and pairs[0][1] <= 0
        known = dict(pairs[1:])
        assert pairs[0][1] == known[token] if token in known else pairs[0][1] <= min(known.values())


def test_drafts_of_others_do_not_matter_and_the_log_verifies(tmp_path):
    """Drafts change no token, with or without closing. The log verifies, also after redaction."""
    asked = []
    for number, schema in enumerate([RECORD, LONG, TREE, LONG]):
        options = make_sampling(
            {"max_tokens": 30, "temperature": 1.0, "seed": number, "frequency_penalty": 0.3}
        )
        for make in (form, closing):
            asked.append((schema, Options(options, grammar=grammar_of(make(schema)))))
    found = []
    for spec in ("auto", "none"):
        config = EngineConfig(num_blocks=19, spec=spec, **SMALL)
        with Engine(config=config, log=tmp_path / spec) as engine:
            found.append(answers(engine, asked))
        assert verify(tmp_path / spec).ok
    for number in range(len(asked)):
        assert found[0][number].token_ids == found[1][number].token_ids
    check_closed(asked[1::2], {at: found[0][2 * at + 1] for at in range(len(asked) // 2)})
    redacted = call_cli("log", "redact", str(tmp_path / "auto"), str(tmp_path / "redacted"))
    assert redacted.returncode == 0, redacted.stderr
    assert verify(tmp_path / "redacted").ok


def test_another_process_goes_on_to_the_same_end(tmp_path):
    folders, wanted = {}, {}
    with Engine(config=EngineConfig(**SMALL), log=tmp_path / "log") as engine:
        for name, schema in zip("abcd", [LONG, TREE, RECORD, LONG], strict=True):
            options = {"max_tokens": 30, "temperature": 1.5, "seed": ord(name)}
            engine.submit(QUESTIONS[0], request_id=name, response_format=closing(schema), **options)
        for step in itertools.count():
            for output in engine.step(received=False):
                wanted[output.request_id] = output.completion or wanted.get(output.request_id)
            if engine.is_idle:
                break
            if engine.stats().num_output_tokens >= (8, 40, 70, 10**9)[len(folders)]:
                folders[step] = copied(tmp_path / "log", tmp_path / f"log{step}")
    assert len(folders) == 3
    for folder in folders.values():
        with Engine(log=folder, resume=Resume()) as engine:
            found = {name: engine.requests.resume(name) for name in "abcd"}
            while not engine.is_idle:
                for output in engine.step():
                    found[output.request_id] = output.completion or found[output.request_id]
        for name, answer in wanted.items():
            assert found[name].token_ids == answer.token_ids and found[name].finish_reason == "stop"
        assert verify(folder).ok


@pytest.mark.parametrize(
    ("asked", "says"),
    [
        (
            {"response_format": form(RECORD) | {"on_truncation": "cut"}},
            "on_truncation must be length or close",
        ),
        ({"grammar": {"regex": "a", "on_truncation": True}}, "grammar.on_truncation must be length or close"),
        ({"response_format": {"type": "text", "on_truncation": "close"}}, "text has no format"),
    ],
)
def test_valid_options(asked, says):
    with pytest.raises(InvalidRequest, match=says):
        grammar_of(**asked)
    assert grammar_of(form(RECORD) | {"on_truncation": "length"}) == grammar_of(form(RECORD))


def test_from_the_command_line(tmp_path):
    schema = tmp_path / "schema.json"
    schema.write_text(json.dumps(LONG))
    options = ["--schema", str(schema), "--max-tokens", "34", "--temperature", "1.5", "--seed", "2"]
    result = call_cli("run", QUESTIONS[0], *options, "--on-truncation", "close", "--json")
    assert result.returncode == 0, result.stderr
    answer = json.loads(result.stdout)
    jsonschema.validate(json.loads(answer["text"]), LONG)
    assert (answer["finish_reason"], answer["detail"]) == ("stop", "closed")
    refused = call_cli("run", QUESTIONS[0], "--on-truncation", "close")
    assert refused.returncode != 0 and "needs --schema" in refused.stderr
