"""Tests response formats for models that reason.

The format begins at the token after the reasoning, with any weights, temperature, batch, drafts and
interruptions.
"""

import asyncio
import itertools
import json
import shutil
from dataclasses import replace

import jsonschema
import numpy as np
import pytest

from mmengine.config import EngineConfig
from mmengine.core.resume import Resume
from mmengine.errors import ConfigError, InvalidRequest, RequestFailed
from mmengine.replay.verify import verify
from mmengine.serve.async_engine.async_engine import AsyncEngine
from mmengine.serve.batch.request_file import RequestFile
from mmengine.serve.batch.run_batch import run_batch
from mmengine.serve.engine.engine import Engine
from mmengine.serve.prompt.options import Options
from mmengine.serve.prompt.prompt import Prompt
from mmengine.serve.text.reasoning import Reasoning
from mmengine.serve.text.request_output import CUT
from mmengine.structured_output.grammar_start import find_end
from mmengine.structured_output.request.spec import grammar_of
from tests.log_copies import copied
from tests.serve.reasoning_jobs import QUESTIONS, RECORD, answers, check, jobs
from tests.structured.strategies import random_schemas
from tests.structured.test_partial_json import goes_on

shapes = pytest.importorskip("mmengine_shapes")

SMALL = {"max_num_seqs": 8, "token_budget": 24, "max_model_len": 256, "num_blocks": 19}


@pytest.fixture(scope="module")
def thinker(tmp_path_factory):
    """The included model with prompts that end with an open <think>, and </think> as a special token."""
    folder = tmp_path_factory.mktemp("thinker") / "model"
    shutil.copytree(shapes.checkpoint_path(), folder)
    template, tokenizer = folder / "chat_template.jinja", folder / "tokenizer.json"
    template.write_text(template.read_text().replace("assistant\\n'", "assistant\\n<think>\\n'"))
    found = json.loads(tokenizer.read_text())
    for token in found["added_tokens"]:
        token["special"] |= token["content"] == "</think>"
    tokenizer.write_text(json.dumps(found))
    return folder


@pytest.fixture(scope="module")
def engine():
    with Engine() as engine:
        yield engine


def settled(tokenizer, prompt, wish=None, start="<think>", end="</think>", eos=(1512,)):
    ids = np.array(tokenizer.encode(prompt, allow_special=True), np.int32)
    options = Options(grammar=grammar_of(grammar={"regex": "a"}), reasoning=wish)
    reasoning = Reasoning(tokenizer, eos, start, end)
    found = reasoning.settle(options, ids)
    assert reasoning.settle(found, ids) == found
    return found.grammar.after


ASK = "<|im_start|>user\nWhy?<|im_end|>\n<|im_start|>assistant\n"


@pytest.mark.parametrize(
    ("prompt", "is_open"),
    [
        (ASK, False),
        (f"{ASK}<think>\n", True),
        (f"{ASK}<think>", True),
        (f"{ASK}<think>\n\n</think>\n\n", False),
        (f"{ASK}<think>\nSo be it, I thou", True),
        (f"{ASK}<think></think><think>", True),
        (f"{ASK}</think>", False),
        ("<|im_start|>user\nWhat is <think>?<|im_end|>\n<|im_start|>assistant\n", False),
        ("<|im_start|>user\n<think><|im_end|>\n<|im_start|>assistant\n<think>", True),
        ("no messages", False),
        ("<think>", True),
        ("<think></think>", False),
    ],
)
def test_whether_a_prompt_leaves_reasoning_open(engine, prompt, is_open):
    tokenizer = engine.processor.tokenizer
    assert settled(tokenizer, prompt) == ((1535,) if is_open else ())
    assert settled(tokenizer, prompt, wish=True) == (1535,)
    assert settled(tokenizer, prompt, wish=False) == ()
    assert settled(tokenizer, prompt, end="") == settled(tokenizer, prompt, start="") == ()
    assert settled(tokenizer, prompt, start="", wish=True) == (1535,)
    many = prompt.replace("<think>", "[THINK]").replace("</think>", "[/THINK]")  # markers with many tokens
    found = settled(tokenizer, many, start="[THINK]", end="[/THINK]")
    assert found == (tuple(tokenizer.encode("[/THINK]")) if is_open else ())


def test_markers_that_cannot_be_said(engine):
    # With reasoning true, a reasoning_end that is empty, or that the model cannot generate, is refused.
    tokenizer = engine.processor.tokenizer
    with pytest.raises(InvalidRequest, match="reasoning true needs a marker .* reasoning_end is empty"):
        settled(tokenizer, ASK, wish=True, end="")
    # a token that ends answers, a text that is normalized, and a text that is too long
    for marker in ("<|im_end|>", "e\u0301nd", "a" * 300):
        with pytest.raises(InvalidRequest, match=r"reasoning true needs reasoning_end, .* no tokens for it"):
            settled(tokenizer, ASK, wish=True, end=marker)
        assert settled(tokenizer, f"{ASK}<think>", end=marker) == ()
    for name, wrong in itertools.product(("reasoning_start", "reasoning_end"), ("a" * 65, "\ud800", 5, None)):
        with pytest.raises(ConfigError):
            EngineConfig(**{name: wrong}).check()
    EngineConfig(reasoning_start="", reasoning_end="é" * 64).check()


NARROW = (
    {**SMALL, "max_in_flight": 2},
    {**SMALL, "spec": "none"},
    {**SMALL, "swap_blocks": 40, "preempt_mode": "swap"},
)
CASES = [
    ("trained", 0.0, "</think>", 14.0),
    ("trained", 1.5, "</think>", 14.0),
    ("random", 0.0, "</think>", 1.0),
    ("random", 1.5, "</think>", 3.5),
    ("random", 1.5, "So", 6.0),
    ("random", 1.5, "...", 4.0),
]


@pytest.mark.parametrize(("weights", "temperature", "end", "bias"), CASES)
def test_stopped_answers_are_valid_wherever_reasoning_ends(weights, temperature, end, bias, random_weights):
    """Preemption, chunked prefill, drafts and steps in flight change no token."""
    model = random_weights if weights == "random" else None
    # 12 jobs use each format twice. Greedy answers from random weights are similar, so the test needs more
    # jobs.
    count = 20 if (weights, temperature) == ("random", 0.0) else 12
    check_pools(model, temperature, end, bias, count, {})


@pytest.mark.soak
@pytest.mark.parametrize(
    ("weights", "temperature", "bias"), [("trained", 0.0, 14.0), ("random", 1.5, 3.5), ("trained", 1.5, 14.0)]
)
def test_many_stopped_answers_are_valid(weights, temperature, bias, random_weights):
    model = random_weights if weights == "random" else None
    forms = [{"schema": schema} for schema in random_schemas(300)]
    check_pools(model, temperature, "</think>", bias, 300, {"forms": forms})


def check_pools(model, temperature, end, bias, count, forms):
    with Engine(model, dtype="float32", config=EngineConfig(reasoning_end=end)) as engine:
        marker = engine.processor.tokenizer.encode(end, allow_special=True)
        asked = list(jobs(count, temperature, marker, bias, **forms))
        wide = answers(engine, asked)
        stopped, lengths = check(engine, asked, wide, marker)
    ends = f"{len(lengths)} of {count} end reasoning, after {lengths[:30]}"
    print(f"{model or 'trained'}, {temperature}, {end}: {ends}; {stopped} stop")
    assert 2 * len(lengths) >= count and 4 * stopped >= count and len(set(lengths)) >= 3
    for settings in NARROW:
        config = EngineConfig(reasoning_end=end, **settings)
        with Engine(model, dtype="float32", config=config) as engine:
            narrow = answers(engine, asked)
            assert engine.stats().num_preemptions > 0
        for number in range(len(asked)):
            assert narrow[number].token_ids == wide[number].token_ids
            assert narrow[number].choices == wide[number].choices


def test_tokens_of_reasoning_are_counted_up_to_its_end():
    """`reasoning_tokens` counts the reasoning's tokens, and the end marker's tokens except the last. The end
    marker has three tokens here. Answers from `generate`, from `chat`, and truncated answers are checked.
    """
    asked = {"grammar": {"regex": "a{3}", "reasoning": True}, "temperature": 0.0, "n": 2}
    with Engine(config=EngineConfig(reasoning_end=" a tiny model")) as engine:
        answer = engine.generate(["Say a word."], max_tokens=20, **asked)[0]
        chat = engine.chat("Say a word.", max_tokens=20, **asked)
        cut = engine.generate(["Say a word."], max_tokens=4, **asked)[0]
        free = engine.generate(["Say a word."], max_tokens=4)[0]
    for choice in answer.choices:
        assert (choice.reasoning, choice.content, len(choice.after)) == ("I am", "aaa", 3)
    for usage in (answer.as_json()["usage"], chat.usage):
        assert usage["completion_tokens_details"]["reasoning_tokens"] == 2 * (2 + 2)
    assert cut.usage["completion_tokens_details"]["reasoning_tokens"] == 2 * 4
    assert "reasoning_tokens" not in free.usage.get("completion_tokens_details", {})


def test_results_of_a_prompt_with_reasoning(thinker, tmp_path):
    bias = {"logit_bias": {1535: 14.0}, "max_tokens": 150}
    form = {"type": "json_schema", "json_schema": {"schema": RECORD}}
    with Engine(thinker) as engine:
        answer = engine.generate([QUESTIONS[0]], response_format=form, **bias)[0]
        choice = answer.choices[0]
        assert choice.after == (1535,) and choice.reasoning and choice.finish_reason == "stop"
        assert choice.text == choice.reasoning + choice.content, "the marker is a special token"
        value = json.loads(choice.content)
        jsonschema.validate(value, RECORD)
        assert answer.as_json()["content"] == choice.content
        assert answer.as_json()["reasoning"] == choice.reasoning
        assert engine.generate_json(QUESTIONS[0], RECORD, **bias) == value
        parts = list(engine.stream_json(QUESTIONS[0], RECORD, **bias))
        assert parts[-1] == value and all(map(goes_on, parts, parts[1:]))

        at_once = engine.generate([QUESTIONS[0]], response_format={**form, "reasoning": False})[0].choices[0]
        assert (at_once.after, at_once.reasoning, at_once.content) == ((), None, at_once.text)
        jsonschema.validate(engine.generate_json(QUESTIONS[0], RECORD, reasoning=False), RECORD)
        assert "content" not in engine.generate([QUESTIONS[0]], max_tokens=3)[0].as_json()

        cut = engine.generate([QUESTIONS[0]], response_format=form, max_tokens=4)[0]
        assert (cut.finish_reason, cut.choices[0].detail, cut.choices[0].content) == ("length", CUT, None)
        assert cut.text == cut.choices[0].reasoning and cut.as_json()["content"] is None
        with pytest.raises(RequestFailed, match="the reasoning did not end after 4 tokens; raise max_tokens"):
            engine.generate_json(QUESTIONS[0], RECORD, max_tokens=4)
        num_reasoned = find_end(choice.token_ids, (1535,))
        for more, begins in ((0, "''"), (2, "'{")):
            with pytest.raises(RequestFailed, match=f"the JSON is incomplete after .* begins {begins}"):
                engine.generate_json(QUESTIONS[0], RECORD, **{**bias, "max_tokens": num_reasoned + more})

    line = {"messages": [{"role": "user", "content": QUESTIONS[0]}], **bias}
    lines = [
        {"custom_id": "a", **line, "response_format": form},
        {"custom_id": "b", **line, "response_format": {**form, "reasoning": False}},
        {"custom_id": "c", **line, "grammar": {"choice": ["a"], "reasoning": 1}},
    ]
    requests = tmp_path / "requests.jsonl"
    requests.write_text("".join(json.dumps(each) + "\n" for each in lines))
    with open(requests, "rb") as file, Engine(thinker) as engine:
        source = RequestFile(file, tmp_path)
        found = [json.loads(source.answer_line(*each)) for each in run_batch(engine, source)]
    found.sort(key=lambda each: each["custom_id"])
    assert json.loads(found[0]["content"]) == value and found[0]["reasoning"] == choice.reasoning
    jsonschema.validate(json.loads(found[1]["text"]), RECORD)
    assert found[2]["error"] == "line 3: grammar.reasoning must be true or false, not 1"

    async def ask():
        async with AsyncEngine(thinker) as engine:
            answer = await engine.generate(QUESTIONS[0], response_format=form, **bias)
            assert answer.choices == [choice]
            with pytest.raises(RequestFailed, match="the reasoning did not end"):
                await engine.generate_json(QUESTIONS[0], RECORD, max_tokens=4)
            parts = [part async for part in engine.stream_json(QUESTIONS[0], RECORD, **bias)]
            assert parts[-1] == value and all(map(goes_on, parts, parts[1:]))
            return await engine.generate_json(QUESTIONS[0], RECORD, reasoning=True, **bias)

    assert asyncio.run(ask()) == value


def test_without_a_marker_to_wait_for(thinker):
    # With an empty reasoning_end, the response format begins at once, and reasoning=True is refused.
    with Engine(thinker, config=EngineConfig(reasoning_end="")) as engine:
        jsonschema.validate(engine.generate_json(QUESTIONS[0], RECORD), RECORD)
        with pytest.raises(InvalidRequest, match="reasoning_end is empty"):
            engine.generate_json(QUESTIONS[0], RECORD, reasoning=True)
        assert engine.is_idle

    async def ask():
        async with AsyncEngine(thinker, config=EngineConfig(reasoning_end="")) as engine:
            with pytest.raises(InvalidRequest, match="reasoning_end is empty"):
                await engine.generate_json(QUESTIONS[0], RECORD, reasoning=True)

    asyncio.run(ask())


def test_another_process_goes_on_in_the_middle_of_the_reasoning(random_weights, tmp_path):
    """The log stores the reasoning's end marker, so a later process may set another `reasoning_end`."""
    wanted, folders, asked = {}, {}, list(jobs(8, 1.5, [1535], 3.5))
    options = {"config": EngineConfig(num_blocks=65), "log": tmp_path / "log"}
    with Engine(random_weights, dtype="float32", **options) as one:
        for number, (_, options) in enumerate(asked):
            prepared = Prompt.of(QUESTIONS[number % 3]).prepare(one.processor)
            one.submit_prepared(prepared, replace(options, request_id=f"r{number}"))
        for step in itertools.count():
            for output in one.step(received=False):
                wanted[output.request_id] = output.completion or wanted.get(output.request_id)
            if one.is_idle:
                break
            if one.stats().num_output_tokens >= (20, 90, 300, 10**9)[len(folders)]:
                folders[step] = copied(tmp_path / "log", tmp_path / f"log{step}")
    assert len(folders) == 3
    num_reasoning = 0
    for folder in folders.values():
        options = {"config": EngineConfig(reasoning_end="[X]"), "log": folder, "resume": Resume(force=False)}
        with Engine(random_weights, dtype="float32", **options) as engine:
            said = [one.token_ids for one in engine.requests.resumed.values()]
            num_reasoning += sum(len(each) > 0 and find_end(each, (1535,)) is None for each in said)
            found = {name: engine.requests.resume(name) for name in wanted}
            while not engine.is_idle:
                for output in engine.step():
                    found[output.request_id] = output.completion or found[output.request_id]
            for name, answer in wanted.items():
                assert found[name].choices == answer.choices
            check(engine, asked, {number: found[f"r{number}"] for number in range(8)}, [1535])
        assert verify(folder).ok
    assert num_reasoning >= 6
