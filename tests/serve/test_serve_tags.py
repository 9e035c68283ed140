"""Tests structural tags in the free text of models' answers.

With any weights, batch size and interruption, each tag is complete and its JSON matches its schema, unless
max_tokens cuts the answer inside a tag.
"""

import asyncio
import json

import jsonschema
import pytest

from mmengine.config import EngineConfig
from mmengine.core.resume import Resume
from mmengine.errors import InvalidRequest
from mmengine.serve.async_engine.async_engine import AsyncEngine
from mmengine.serve.engine.engine import Engine
from mmengine.serve.pipeline.pipeline import Pipeline
from mmengine.serve.prompt.options import Options, make_sampling
from mmengine.serve.prompt.prompt import Prompt
from mmengine.structured_output.request.spec import grammar_of
from tests.cli.cli_process import call_cli
from tests.log_copies import copied
from tests.serve.queued_batch import answers_at_once

pytest.importorskip("mmengine_shapes")

TOOL_CALL, BOX_START, END = 1524, 1517, 1512  # the tokens <tool_call>, <|box_start|> and <|im_end|>
AREA = {
    "type": "object",
    "properties": {
        "sides": {"type": "integer", "minimum": 3, "maximum": 9},
        "unit": {"enum": ["cm", "größe"]},
    },
    "required": ["sides"],
    "additionalProperties": False,
}
DRAW = {"type": "array", "items": {"enum": ["circle", "square"]}, "minItems": 1, "maxItems": 2}
TOOLS = {  # Qwen3's format of tool calls
    "structures": [
        {"begin": '<tool_call>\n{"name": "area", "arguments": ', "schema": AREA, "end": "}\n</tool_call>"},
        {"begin": '<tool_call>\n{"name": "draw", "arguments": ', "schema": DRAW, "end": "}\n</tool_call>"},
    ],
    "triggers": ["<tool_call>"],
    "bounds": {"whitespace": 2},
}
WORDS = {  # tags begin with a frequent text, or with a special token
    "structures": [
        {"begin": " square", "schema": AREA, "end": "!"},
        {"begin": " there ", "schema": DRAW, "end": ")"},
        {"begin": "<|box_start|>", "schema": AREA, "end": "<|box_end|>"},
    ],
    "triggers": [" squa", " the", "<|box_start|>"],
    "bounds": {"whitespace": 2},
}


def calls(text, asked):
    """Check the tags in a text. Return their values, and whether the text ends inside a tag."""
    found = []
    while any(trigger in text for trigger in asked["triggers"]):
        text = text[min(text.index(trigger) for trigger in asked["triggers"] if trigger in text) :]
        structure = next((each for each in asked["structures"] if text.startswith(each["begin"])), None)
        if structure is None:
            assert any(each["begin"].startswith(text) for each in asked["structures"]), text
            return found, True
        rest = text[len(structure["begin"]) :]
        try:
            value, length = json.JSONDecoder().raw_decode(rest)
        except ValueError:
            return found, True
        if len(rest) < length + len(structure["end"]):
            return found, True
        assert rest[length:].startswith(structure["end"]), text
        jsonschema.validate(value, structure["schema"])
        found.append(value)
        text = rest[length + len(structure["end"]) :]
    return found, False


def jobs(count, bias):
    for number in range(count):
        asked = WORDS if number % 3 else {**TOOLS, "at_least_one": number % 2 == 0}
        sampling = {"max_tokens": 120, "temperature": 1.5 if number % 4 else 0.0, "seed": number}
        sampling["logit_bias"] = {TOOL_CALL if asked is not WORDS else BOX_START: bias, END: 7.0}
        yield asked, Options(make_sampling(sampling), grammar=grammar_of(grammar={"structural_tag": asked}))


def answers(engine, asked):
    return answers_at_once(engine, ((Prompt.of("Describe a square."), options) for _, options in asked))


def whole(engine, answer):
    """Return the text with its special tokens."""
    return engine.processor.tokenizer.decode(answer.token_ids, skip_special_tokens=False)


@pytest.mark.parametrize("weights", ["trained", "random"])
def test_every_tag_is_what_its_schema_describes(weights, random_weights):
    model = random_weights if weights == "random" else None
    asked = list(jobs(24, bias=22.0 if model is None else 10.0))
    with Engine(model, dtype="float32") as engine:
        wide = answers(engine, asked)
        texts = [whole(engine, wide[number]) for number in range(len(asked))]
    small = EngineConfig(num_blocks=18, max_num_seqs=8, token_budget=24, max_model_len=256)
    with Engine(model, dtype="float32", config=small) as engine:
        narrow = answers(engine, asked)
        assert engine.stats().num_preemptions
    num_tags = num_stopped = 0
    for number, (form, _) in enumerate(asked):
        assert narrow[number].token_ids == wide[number].token_ids
        found, is_inside = calls(texts[number].removesuffix("<|im_end|>"), form)
        if wide[number].finish_reason == "stop":
            assert not is_inside and (found or not form.get("at_least_one")), texts[number]
            num_stopped += 1
        else:
            assert wide[number].finish_reason == "length", wide[number].choices[0].detail
        num_tags += len(found)
    print(f"{weights}: {num_tags} tags in {len(asked)} answers, {num_stopped} of them stop")
    assert num_tags >= 10 and num_stopped >= 2


def test_the_first_call_ends_the_answer_and_its_text_is_the_call():
    # `form` requires a call and ends the answer after the call. Tags also work in a pipeline and in a stream.
    form = {**TOOLS, "stop_after_first": True, "at_least_one": True}
    options = {"logit_bias": {TOOL_CALL: 100.0}, "max_tokens": 200}
    with Engine() as engine:
        answer = engine.generate(["What is its area?"], grammar={"structural_tag": form}, **options)[0]
        assert answer.finish_reason == "stop" and answer.text.startswith("<tool_call>\n")
        call = json.loads(answer.text.removeprefix("<tool_call>").removesuffix("</tool_call>"))
        jsonschema.validate(call["arguments"], {"area": AREA, "draw": DRAW}[call["name"]])
        same = engine.generate(
            ["What is its area?"], response_format={"type": "structural_tag", **form}, **options
        )
        assert same[0].token_ids == answer.token_ids
        bad = {
            **TOOLS,
            "structures": [*TOOLS["structures"], {"begin": "<tool_call>!", "schema": False, "end": ""}],
        }
        with pytest.raises(InvalidRequest, match=r"structural_tag.structures\[2\]: schema refused: at #: "):
            engine.generate(["What is its area?"], grammar={"structural_tag": bad})

    pipe = Pipeline(model=None, max_new_tokens=200)
    chat = [{"role": "user", "content": "What is its area?"}]
    record = pipe(text=chat, return_full_text=False, grammar={"structural_tag": WORDS})[0]
    calls(record["generated_text"], WORDS)
    pipe.close()

    async def ask():
        async with (
            AsyncEngine() as engine,
            engine.stream("What is its area?", grammar={"structural_tag": form}, **options) as stream,
        ):
            return "".join([output.text async for output in stream])

    assert asyncio.run(ask()) == answer.text


def test_lines_of_a_request_file(tmp_path):
    lines = [
        {"grammar": {"structural_tag": {**TOOLS, "stop_after_first": True}}},
        {
            "response_format": {
                "type": "structural_tag",
                **TOOLS,
                "triggers": ["<tool"],
                "stop_after_first": True,
            }
        },
        {"grammar": {"structural_tag": {**TOOLS, "triggers": ["<tools>"]}}},
    ]
    shared = {"messages": [{"role": "user", "content": "Draw."}], "logit_bias": {str(TOOL_CALL): 100}}
    lines = [
        {"custom_id": str(number), **shared, "max_tokens": 150, **each} for number, each in enumerate(lines)
    ]
    (tmp_path / "in.jsonl").write_text("\n".join(map(json.dumps, lines)))
    done = call_cli("run", "--batch", str(tmp_path / "in.jsonl"), "--out", str(tmp_path / "out.jsonl"))
    assert done.returncode == 1, done.stderr  # the third line has an error
    answered = {each["custom_id"]: each for each in map(json.loads, (tmp_path / "out.jsonl").open())}
    assert answered["0"]["text"] == answered["1"]["text"] and len(calls(answered["0"]["text"], TOOLS)[0]) == 1
    assert (
        "line 3: grammar.structural_tag.triggers[0], '<tools>', starts no structure" in answered["2"]["error"]
    )


def test_another_process_goes_on_inside_a_tag(tmp_path):
    options = {"max_tokens": 120, "temperature": 1.5, "logit_bias": {TOOL_CALL: 6.0}}
    folders = []
    with Engine(log=tmp_path / "log") as engine:
        for number in range(6):
            form = {"structural_tag": WORDS if number % 2 else TOOLS}
            engine.submit("Draw.", request_id=str(number), grammar=form, seed=number, **options)
        wanted = {}
        while not engine.is_idle:
            for output in engine.step(received=False):
                wanted[output.request_id] = output.completion
            if engine.stats().num_output_tokens >= (40, 150, 10**9)[len(folders)]:
                folders.append(copied(tmp_path / "log", tmp_path / f"log{len(folders)}"))
    assert len(folders) == 2
    for folder in folders:
        with Engine(log=folder, resume=Resume()) as engine:
            found = {name: engine.requests.resume(name) for name in wanted}
            assert not all(found.values())
            while not engine.is_idle:
                for output in engine.step():
                    found[output.request_id] = output.completion or found[output.request_id]
        for name, answer in wanted.items():
            assert found[name].token_ids == answer.token_ids
