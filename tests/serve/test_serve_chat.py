"""Tests `Engine.chat` with forced tool calls, and with chat templates for calls in JSON and in XML."""

import json
from pathlib import Path

import jsonschema
import pytest
from transformers.utils import chat_template_utils

from mmengine import Engine, Prompt
from mmengine.config import EngineConfig
from mmengine.errors import InvalidRequest
from mmengine.request import SamplingParams
from mmengine.serve.batch.run_batch import run_batch
from mmengine.serve.prompt.chat_messages import for_template
from mmengine.serve.prompt.options import Options
from mmengine.serve.prompt.tools import ToolLimits, parse_tools

JSON_TEMPLATE = (Path(__file__).parents[2] / "examples" / "tool_calls.jinja").read_text()
XML_TEMPLATE = """{%- if tools -%}<|im_start|>system
<tools>{% for tool in tools %}
{{ tool.function.name }}: {{ tool.function.parameters | tojson }}{% endfor %}
</tools><|im_end|>
{% endif -%}
{%- for message in messages -%}
{{- '<|im_start|>' + message.role + '\\n' + message.content -}}
{%- for call in message.tool_calls or [] -%}
{{- '<tool_call>\\n<function=' + call.function.name + '>\\n' -}}
{%- for name, value in call.function.arguments|items -%}
{{- '<parameter=' + name + '>\\n' -}}
{{- (value | string if value is string else value | tojson) + '\\n</parameter>\\n' -}}
{%- endfor -%}
{{- '</function>\\n</tool_call>' -}}
{%- endfor -%}
{{- '<|im_end|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{- '<|im_start|>assistant\\n' + ('<think>\\n' if think else '') -}}
{%- endif -%}"""
TEMPLATES = {"json": JSON_TEMPLATE, "xml": XML_TEMPLATE}
SHAPES = {
    "type": "object",
    "properties": {
        "shape": {"enum": ["square", "circle"]},
        "side": {"type": "integer", "minimum": 1, "maximum": 9},
        "note": {"type": "string", "maxLength": 6},
    },
    "required": ["shape", "side"],
    "additionalProperties": False,
}


def tool(parameters, name="area", **more):
    return {"type": "function", "function": {"name": name, "parameters": parameters, **more}}


TOOLS = [tool(SHAPES, description="The area of a shape.", strict=True), tool({}, "now")]
QUESTION = {"role": "user", "content": "How large is a square?"}
ONE = {"tool_choice": "required", "parallel_tool_calls": False, "max_tokens": 96, "temperature": 0.0}
AREA = {"type": "function", "function": {"name": "area"}}


def prompt(form, *more, **variables):
    return Prompt(
        messages=[QUESTION, *more], template_options={"chat_template": TEMPLATES[form], **variables}
    )


@pytest.fixture(scope="module")
def engine():
    with Engine() as made:
        yield made


@pytest.mark.parametrize("form", ["json", "xml"])
def test_a_call_its_result_and_an_answer(engine, form):
    answer = engine.chat(prompt(form), tools=TOOLS, **{**ONE, "tool_choice": AREA})
    (call,) = answer.message.tool_calls
    assert answer.message.content is None and answer.finish_reason == "stop"
    assert call.function.name == "area" and call.type == "function"
    jsonschema.validate(json.loads(call.function.arguments), SHAPES)
    result = {"role": "tool", "tool_call_id": call.id, "content": "9"}
    asked = prompt(form, answer.message.as_json(), result)
    last = engine.chat(asked, tools=TOOLS, tool_choice="none", max_tokens=8, temperature=0.0)
    assert last.message.content and last.message.tool_calls is None
    again = engine.chat(prompt(form), tools=TOOLS, **ONE)
    assert again.finish_reason == "tool_calls" and again.message.tool_calls[0].id != call.id


def test_choices_and_what_does_not_fit(engine):
    answer = engine.chat(prompt("json"), tools=TOOLS, n=2, seed=3, **{**ONE, "temperature": 1.0})
    assert len({choice.message.tool_calls[0].id for choice in answer.choices}) == 2
    cut = engine.chat(prompt("json"), tools=TOOLS, **{**ONE, "tool_choice": AREA, "max_tokens": 15})
    assert cut.finish_reason == "length"
    text = engine.chat(prompt("json"), tools=TOOLS, max_tokens=16, temperature=0.0, stop=["e"])
    assert (
        text.finish_reason == "stop"
        and "e" not in text.message.content
        and text.choices[0].stop_reason == "e"
    )
    form = {"type": "json_schema", "json_schema": {"schema": {"enum": [1, 2]}}}
    either = engine.chat(prompt("json"), tools=TOOLS, max_tokens=96, response_format=form, temperature=0.0)
    assert either.message.tool_calls or json.loads(either.message.content) in (1, 2)
    for options, words in (
        ({"grammar": {"regex": "a"}}, "response_format beside tools must be json_schema"),
    ):
        with pytest.raises(InvalidRequest, match=words):
            engine.chat(prompt("json"), tools=TOOLS, **options)
    with pytest.raises(InvalidRequest, match="tools need a chat template"):
        engine.chat([QUESTION], tools=TOOLS)
    assert engine.chat([QUESTION], tools=[], max_tokens=4).message.content
    stream = engine.stream_chat([QUESTION], max_tokens=8, logprobs=1)
    told = [entry for chunk in stream for entry in chunk.choices[0].logprobs or ()]
    assert tuple(told) == stream.get_final_completion().choices[0].logprobs and len(told) > 4


def test_between_two_answers_of_a_batch_it_takes_none_of_them():
    # A call of `chat` while a batch runs leaves all answers to the batch.
    jobs = [(Prompt.of("What?"), Options(SamplingParams(max_tokens=2 + k % 3))) for k in range(6)]
    with Engine(config=EngineConfig(max_num_seqs=4)) as engine:
        batch = run_batch(engine, iter(jobs))
        found = [next(batch)]
        assert engine.chat([QUESTION], max_tokens=12).message.content
        found += batch
    assert sorted(index for index, _ in found) == list(range(6))


def test_a_failed_write_leaves_no_file(engine, monkeypatch):
    """If `chat` raises while it reads an answer, the request ends. The engine answers the next request."""

    def broken(self, output):
        raise RuntimeError("broken")

    with monkeypatch.context() as patched:
        patched.setattr("mmengine.serve.chat.completion.ChatAnswer.take", broken)
        with pytest.raises(RuntimeError, match="broken"):
            engine.chat([QUESTION], max_tokens=200, ignore_eos=True)
    assert not engine.has_work and engine.chat([QUESTION], max_tokens=4).message.content


def test_an_unenforceable_schema(engine):
    """A schema that cannot be enforced gives a note. A strict tool with this schema is refused."""
    loose = {**SHAPES, "properties": {**SHAPES["properties"], "all": UNIQUE}}
    answer = engine.chat(prompt("xml"), tools=[tool(loose)], **ONE)
    assert [(note.keyword, note.pointer) for note in answer.notes if note.keyword] == [("tools", "#/area")]
    with pytest.raises(
        InvalidRequest, match=r"tools\[0\]\.function\.parameters: .* at #/properties/all/uniqueItems"
    ):
        engine.chat(prompt("xml"), tools=[tool(loose, strict=True)], **ONE)


UNIQUE = {"type": "array", "uniqueItems": True, "items": {"type": "number"}}


def test_calls_come_behind_reasoning(engine):
    options = {**ONE, "logit_bias": {engine.processor.tokenizer.encode("</think>")[0]: 20.0}}
    answer = engine.chat(prompt("xml", think=True), tools=TOOLS, **options)
    assert answer.message.reasoning_content and answer.message.content is None
    assert answer.message.tool_calls and answer.usage["completion_tokens_details"]["reasoning_tokens"] > 2


ASSISTANT = {
    "role": "assistant",
    "content": None,
    "tool_calls": [
        {
            "id": "c",
            "type": "function",
            "function": {"name": "area", "arguments": '{"side": 1.0, "note": "é"}'},
        }
    ],
}


@pytest.mark.parametrize("form", ["json", "xml"])
def test_the_prompt_is_transformers(engine, form):
    """The chat template gets call arguments as objects, as in transformers, although messages contain JSON
    text.
    """
    messages = [
        QUESTION,
        ASSISTANT,
        {"role": "tool", "tool_call_id": "c", "content": [{"type": "text", "text": "2"}]},
    ]
    plain = json.loads(json.dumps(messages))
    plain[1]["content"], plain[2]["content"] = "", "2"
    plain[1]["tool_calls"][0]["function"]["arguments"] = {"side": 1.0, "note": "é"}
    expected, _ = chat_template_utils.render_jinja_template(
        [plain], tools=TOOLS, chat_template=TEMPLATES[form], add_generation_prompt=True
    )
    asked = Prompt(
        messages=for_template(messages), template_options={"chat_template": TEMPLATES[form], "tools": TOOLS}
    )
    assert asked.prepare(engine.processor).text == expected[0]


@pytest.mark.parametrize(
    ("message", "words"),
    [
        (
            {"function": {"name": "f", "arguments": "{"}},
            r"messages\[0\]\.tool_calls\[0\]\.function\.arguments is not JSON",
        ),
        ({"function": {"name": "f", "arguments": "[]"}}, "must be an object"),
        ({"function": {"name": 1}}, r"function\.name must be a string"),
        ({}, r"function must be an object"),
    ],
)
def test_calls_that_come_back_are_checked(message, words):
    with pytest.raises(InvalidRequest, match=words):
        for_template([{**ASSISTANT, "tool_calls": [message]}])


NAMED = {"type": "function", "function": {"name": "x"}}


@pytest.mark.parametrize(
    ("tools", "choice", "words"),
    [
        (TOOLS * 65, None, "tools has 130 entries; the limit is 128"),
        ([tool({"description": "a" * 300_000})], None, "bytes as JSON; the limit is"),
        ([TOOLS[0], TOOLS[0]], None, r"tools\[1\]\.function\.name, 'area', is also the name of another"),
        ([tool({}, "no spaces")], None, r"tools\[0\]\.function\.name must have 1 to 128"),
        ([tool({}, strict=1)], None, r"tools\[0\]\.function\.strict must be true or false"),
        ([tool({}, other=1)], None, r"tools\[0\]\.function has the unknown field 'other'"),
        ([{"type": "custom"}], None, r"tools\[0\]\.type must be function, not 'custom'"),
        ("area", None, "tools must be a list"),
        (TOOLS, "always", "tool_choice must be none, auto, required"),
        (TOOLS, NAMED, r"tool_choice\.function\.name, 'x', is not among the tools: area, now"),
        ([], "required", "tool_choice asks for a call"),
        (
            TOOLS,
            {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [NAMED]}},
            "is not among the tools",
        ),
    ],
)
def test_tools_are_checked(tools, choice, words):
    with pytest.raises(InvalidRequest, match=words):
        parse_tools(tools, choice)


def test_valid_tool_choices():
    allowed = {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [AREA]}}
    found = parse_tools(TOOLS, allowed)
    assert found.choice == "required" and [each.name for each in found.tools] == ["area"]
    assert len(found.shown) == 2
    assert parse_tools(TOOLS, "none") is None and parse_tools([], "auto") is None
    assert parse_tools([tool({})], limits=ToolLimits(is_strict=True)).tools[0].is_strict
