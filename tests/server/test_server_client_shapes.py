"""Tests of bodies that clients of the vendors' APIs send: refusals, forced calls, allowed tools, tool names,
grammars of custom tools, and characters that JSON cannot hold.
"""

import pytest

from mmengine import AsyncEngine
from tests.serve.test_serve_chat import JSON_TEMPLATE, SHAPES
from tests.server.running import served
from tests.server.test_server_agents import FUNCTION, LEFT_OUT

ASKED = {"role": "user", "content": "What is a triangle?"}
MARKED = (
    {"grammar": '\ufeffroot ::= "a"'},
    {"grammar": '\ufeffstart: "a"'},
    {"json": '\ufeff{"const": 7}'},
)
TOOL = {"name": "area", "input_schema": SHAPES}


@pytest.fixture(scope="module")
def server():
    with served(AsyncEngine(), names=("shapes",), chat_template=JSON_TEMPLATE) as one:
        yield one


@pytest.fixture(scope="module")
def strict():
    with served(AsyncEngine(), names=("shapes",), chat_template=JSON_TEMPLATE, unsupported="strict") as one:
        yield one


def message(server, **fields):
    return server.call("/v1/messages", {"max_tokens": 2, "messages": [ASKED], "temperature": 0, **fields})


def chat(server, *messages, **fields):
    body = {"messages": messages, "max_tokens": 2, "temperature": 0, **fields}
    return server.call("/v1/chat/completions", body)


@pytest.mark.parametrize("choice", [{"type": "any"}, {"type": "tool", "name": "area"}])
@pytest.mark.parametrize("tools", [{}, {"tools": []}])
def test_a_forced_call_without_tools_is_refused(server, choice, tools):
    status, _, answer = message(server, tool_choice=choice, **tools)
    assert status == 400 and answer["error"]["message"].startswith("tool_choice asks for a call")
    for kind in ("auto", "none"):
        assert message(server, tool_choice={"type": kind}, **tools)[0] == 200


def test_hosted_tools_are_left_out_of_the_allowed_tools(server, strict):
    hosted, own = {"type": "web_search"}, {"type": "function", "name": "area"}
    for tools, place in (([own, hosted], 1), ([hosted, own], 0)):
        choice = {"type": "allowed_tools", "mode": "required", "tools": tools}
        fields = {"tools": [hosted, FUNCTION, {**FUNCTION, "name": "other"}], "tool_choice": choice}
        status, headers, answer = server.respond("hi", **fields)
        assert status == 200, answer
        named = f"tools[0].type (web_search), tool_choice.tools[{place}].type (web_search)"
        assert headers[LEFT_OUT] == named
        assert [each["name"] for each in answer["output"]] == ["area"]
        status, _, answer = strict.respond("hi", **{**fields, "tools": [FUNCTION]})
        assert (status, answer["error"]["param"]) == (400, f"tool_choice.tools[{place}].type")


@pytest.mark.parametrize(
    ("tools", "param"),
    [
        ([{"type": "web_search"}], "tool_choice.tools[0].type"),
        ([{"type": "web_search"}, {"type": "function", "name": "none"}], "tool_choice.tools[1].name"),
        ([{"type": 3}, {"type": "function", "name": "area"}], "tool_choice.tools[0].type"),
    ],
)
def test_allowed_tools_need_a_tool_of_the_client(server, tools, param):
    choice = {"type": "allowed_tools", "mode": "auto", "tools": tools}
    status, _, answer = server.respond("hi", tools=[FUNCTION, {"type": "web_search"}], tool_choice=choice)
    assert (status, answer["error"]["param"]) == (400, param), answer


def test_no_mcp_servers_are_accepted_when_tokens_are_counted(server, strict):
    for one in (server, strict):
        counted = one.call("/v1/messages/count_tokens", {"messages": [ASKED], "mcp_servers": []})
        assert counted[0] == 200 and LEFT_OUT not in counted[1]


def test_tool_names_have_up_to_128_characters(server):
    for name, status in (("n" * 128, 200), ("n" * 129, 400), ("a.b", 400)):
        assert message(server, tools=[{**TOOL, "name": name}])[0] == status


def test_refusals_in_the_history_are_text(server):
    """OpenAI's API accepts a refusal in place of the assistant's content, and as a part of the content."""
    content = chat(server, ASKED, {"role": "assistant", "content": "No."}, ASKED)
    for turn in ({"content": None, "refusal": "No."}, {"content": [{"type": "refusal", "refusal": "No."}]}):
        answer = chat(server, ASKED, {"role": "assistant", **turn}, ASKED)
        assert answer[0] == 200, answer
        assert answer[2]["usage"]["prompt_tokens"] == content[2]["usage"]["prompt_tokens"]
    only_thought = {"role": "assistant", "content": None, "reasoning_content": "A shape."}
    assert chat(server, ASKED, only_thought, ASKED)[0] == 200
    assert chat(server, ASKED, {"role": "assistant", "content": None}, ASKED)[0] == 400
    assert chat(server, {"role": "user", "content": [{"type": "refusal", "refusal": "No."}]})[0] == 400


@pytest.mark.parametrize(
    "part",
    [
        {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AAAA"}},
        {"type": "image_url", "image_url": None},
        {"type": "image_url"},
        {"type": "video_url", "video_url": None},
    ],
)
def test_a_media_part_without_data_is_named(server, part):
    status, _, answer = chat(server, {"role": "user", "content": [{"type": "text", "text": "a"}, part]})
    assert (status, answer["error"]["param"]) == (400, "messages[0].content[1]")
    assert answer["error"]["message"].endswith("with a data: URL")


@pytest.mark.parametrize("regex", ["(a", "(?=a)b", "a)(b"])
def test_a_regex_of_a_custom_tool_that_cannot_be_enforced_is_named(server, strict, regex):
    form = {"type": "grammar", "syntax": "regex", "definition": regex}
    fields = {"tools": [{"type": "custom", "name": "patch", "format": form}], "max_output_tokens": 2}
    status, _, answer = strict.respond("a", store=False, **fields)
    assert (status, answer["error"]["param"]) == (400, "tools[0].format.definition")
    assert "regular expression cannot be enforced" in answer["error"]["message"]
    status, headers, answer = server.respond("a", store=False, **fields)
    assert status == 200, answer
    assert headers[LEFT_OUT] == "tools[0].format.definition (regex, not enforced)"


@pytest.mark.parametrize("escape", [b"\\ud83d", b"a\\ude00", b"\\ud83d\\ude00\\ud83d", b"\\\\\\ud800 b"])
def test_half_of_a_surrogate_pair_is_named(server, escape):
    body = b'{"messages": [{"role": "user", "content": "%b"}]}' % escape
    status, _, answer = server.call("/v1/chat/completions", body)
    assert status == 400 and "is half of a surrogate pair" in answer["error"]["message"]


def test_bodies_that_are_nested_too_deeply_say_so(server):
    body = b'{"messages": [{"role": "user", "content": "a"}], "metadata": ' + b"[" * 5000 + b"]" * 5000 + b"}"
    status, _, answer = server.call("/v1/chat/completions", body)
    assert status == 400 and "nested too deeply" in answer["error"]["message"]


@pytest.mark.parametrize("form", MARKED)
def test_grammars_may_begin_with_a_byte_order_mark(server, form):
    status, _, answer = chat(server, ASKED, structured_outputs=form, max_tokens=8)
    assert status == 200, answer
    assert answer["choices"][0]["message"]["content"] == ("7" if "json" in form else "a")
