"""Tests a limit on reasoning. At the limit, the engine writes the end marker, and the answer follows.

The limit also holds in any batch, with drafts, and after an interruption.
"""

import asyncio
import io
import itertools
import json
from dataclasses import replace
from pathlib import Path

import jsonschema
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mmengine import AsyncEngine, Engine, Prompt
from mmengine.config import EngineConfig
from mmengine.core.resume import Resume
from mmengine.errors import InvalidRequest
from mmengine.replay.convert.redact import redact
from mmengine.replay.verify import verify
from mmengine.request import ThinkingBudget
from mmengine.runtime.sampling.thinking import ReasoningState
from mmengine.serve.batch.request_file import RequestFile
from mmengine.serve.batch.run_batch import run_batch
from mmengine.structured_output.grammar_start import find_end
from tests.cli.cli_process import call_cli
from tests.log_copies import copied
from tests.serve.test_serve_structured import RECORD, SMALL, form

pytest.importorskip("mmengine_shapes")

END = (7, 8, 7, 9)


@given(st.lists(st.sampled_from([3, 7, 8, 9]), max_size=30), st.integers(0, 9), st.booleans())
def test_the_end_marker_is_forced_at_the_budget(model, tokens, is_open):
    """`model` has the tokens that the model would choose, in order."""
    budget = ThinkingBudget(tokens, is_open, (3,), END)
    said, reasoned = [], ReasoningState.begin(budget)
    for token in model:
        due = reasoned.next(budget)
        said.append(token if due is None else due)
        reasoned = reasoned.after(budget, said[-1])
    begins = 0 if is_open else 1
    if not is_open and said[:1] != [3]:
        assert said == model and (reasoned.is_over or not said)
        return
    end = find_end(said, END, begins)
    assert reasoned.is_over == (end is not None)
    if end is None:
        assert len(said) - begins < tokens + len(END)
    else:
        assert end - begins - len(END) <= tokens and said[end:] == model[end:]


def open_prompt(number=0):
    text = ("What is a triangle?", "How many?", "Say a word.")[number % 3]
    return Prompt(text=f"<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n<think>\n")


def jobs(number):
    """Return options with a budget, for free text or for a response format after reasoning."""
    options = {
        "max_tokens": 70,
        "temperature": 1.4,
        "seed": number,
        "thinking_token_budget": (0, 3, 11)[number % 3],
    }
    options["repetition_penalty"] = 1.0 if number % 4 else 1.2
    options["logprobs"] = 1 if number % 5 == 0 else None
    if number % 2:
        options["response_format"] = form(RECORD) | {"on_truncation": ("length", "close")[number // 2 % 2]}
    return options


def run(engine, count=8):
    for number in range(count):
        engine.submit(open_prompt(number), request_id=str(number), **jobs(number))
    found, texts = {}, {}
    while not engine.is_idle:
        for output in engine.step():
            texts[output.request_id] = texts.get(output.request_id, "") + output.text
            found[output.request_id] = output.completion or found.get(output.request_id)
    assert all(texts[name] == one.text for name, one in found.items())
    return found


def test_nothing_changes_the_tokens(tmp_path):
    """Preemption, steps in flight and drafts do not change the tokens. The budget limits the reasoning."""
    with Engine() as engine:
        wide = run(engine)
        marker = engine.processor.tokenizer.encode("</think>", allow_special=True)
    for number, settings in enumerate(
        (
            {**SMALL, "num_blocks": 9, "max_model_len": 128, "spec": "ngram"},
            {"max_in_flight": 2, "spec": "none"},
            {"spec": "eagle3", "draft_policy": "all"},
        )
    ):
        log = tmp_path / str(number)
        with Engine(config=EngineConfig(**settings), log=log) as engine:
            found = run(engine)
            preempted = engine.stats().num_preemptions
        assert bool(preempted) == (number == 0)
        for name, one in wide.items():
            mine, theirs = (replace(each.choices[0], logprobs=None) for each in (found[name], one))
            assert mine == theirs, (name, settings)
        assert verify(log).ok
    redact(log, tmp_path / "redacted", bytes(16))
    assert verify(tmp_path / "redacted").ok
    num_ended = 0
    for name, one in wide.items():
        asked, choice = jobs(int(name)), one.choices[0]
        end = find_end(choice.token_ids, marker)
        if end is None:  # the model ended its text before the marker
            assert choice.detail == "eos" and len(choice.token_ids) <= asked["thinking_token_budget"] + 1
            continue
        assert end - len(marker) <= asked["thinking_token_budget"]
        num_ended += 1
        if "response_format" in asked and choice.finish_reason == "stop":
            jsonschema.validate(json.loads(choice.content), RECORD)
        if choice.logprobs is not None:
            assert [each[0][0] for each in choice.logprobs] == choice.token_ids
    assert num_ended >= 6


def test_another_process_ends_reasoning_where_this_one_would(tmp_path):
    folders = {}
    with Engine(config=EngineConfig(**SMALL), log=tmp_path / "log") as engine:
        for number in range(6):
            engine.submit(open_prompt(number), request_id=str(number), **jobs(number))
        wanted = {}
        for step in itertools.count():
            for output in engine.step(received=False):
                wanted[output.request_id] = output.completion or wanted.get(output.request_id)
            if engine.is_idle:
                break
            if step in (3, 9, 16):
                folders[step] = copied(tmp_path / "log", tmp_path / f"log{step}")
    for folder in folders.values():
        with Engine(log=folder, resume=Resume()) as engine:
            found = {name: engine.requests.resume(name) for name in wanted}
            while not engine.is_idle:
                for output in engine.step():
                    found[output.request_id] = output.completion or found[output.request_id]
        assert {name: one.token_ids for name, one in found.items()} == {
            name: one.token_ids for name, one in wanted.items()
        }
        assert verify(folder).ok


def test_from_python_and_the_command_line(tmp_path):
    with Engine(config=EngineConfig(reasoning_start="The")) as engine:
        marker = engine.processor.tokenizer.encode("The")
        options = {"logit_bias": dict.fromkeys(marker, 30.0), "temperature": 0.0, "max_tokens": 24}
        one = engine.chat("?", thinking_token_budget=4, **options)
        assert one.message.reasoning_content is not None and one.usage["completion_tokens_details"]
        assert one.usage["completion_tokens_details"]["reasoning_tokens"] >= 4
        free = engine.chat("?", thinking_token_budget=-1, **options)
        assert free.message.content != one.message.content
        with pytest.raises(InvalidRequest, match="thinking_token_budget must be a number of tokens"):
            engine.chat("?", thinking_token_budget=-2)
    unknown = pytest.raises(InvalidRequest, match="thinking_token_budget needs a marker")
    with Engine(config=EngineConfig(reasoning_end="")) as engine, unknown:
        engine.generate(["?"], thinking_token_budget=3)

    async def chat():
        async with AsyncEngine() as engine:
            return await engine.chat(open_prompt(), thinking_token_budget=3, temperature=0.0, max_tokens=40)

    assert asyncio.run(chat()).usage["completion_tokens_details"]["reasoning_tokens"] < 3 + 12
    schema = tmp_path / "schema.json"
    schema.write_text(json.dumps(RECORD))
    asked = ["--schema", str(schema), "--reasoning", "--json", "--thinking-token-budget", "2"]
    done = call_cli("run", "What is a square?", *asked)
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    assert answer["text"] == answer["reasoning"] + "</think>" + answer["content"]


@pytest.mark.parametrize("response_format", [None, form(RECORD)])
def test_half_a_character_stays_in_the_reasoning(response_format):
    """The budget ends within a character."""
    with Engine() as engine:
        tokenizer = engine.processor.tokenizer
        half, *others = tokenizer.encode("\u2603")
        assert others and tokenizer.decode([half]) == "\ufffd"
        asked = {"thinking_token_budget": 2, "max_tokens": 70, "temperature": 0.0}
        asked |= {"response_format": response_format, "logit_bias": {half: 90.0}}
        chunks = engine.stream_chat(open_prompt(), **asked)
        deltas = [chunk.choices[0].delta for chunk in chunks]
        message = chunks.get_final_completion().message
        (whole,) = engine.generate([open_prompt()], **asked)
        assert message.reasoning_content == "".join(one.reasoning_content or "" for one in deltas)
        assert message.reasoning_content == tokenizer.decode([half, half])
        assert whole.text == tokenizer.decode(whole.token_ids)
        marker = tokenizer.encode("</think>", allow_special=True)
        assert whole.token_ids[:2] == [half, half] and find_end(whole.token_ids, marker) == 2 + len(marker)
        assert message.content == tokenizer.decode(whole.token_ids[2 + len(marker) :])
        if response_format is not None:
            jsonschema.validate(json.loads(message.content), RECORD)


def test_a_line_of_a_batch_has_a_budget():
    line = {"custom_id": "a", "messages": [{"role": "user", "content": "?"}], "thinking_token_budget": 2}
    line |= {"response_format": form(RECORD) | {"reasoning": True}, "max_tokens": 90}
    (job,) = RequestFile(io.BytesIO(json.dumps(line).encode()), Path("."))
    with Engine() as engine:
        ((_, answer),) = run_batch(engine, iter([job]))
        marker = engine.processor.tokenizer.encode("</think>", allow_special=True)
    assert find_end(answer.token_ids, marker) <= 2 + len(marker)
