"""Tests of tool_choice with allowed tools in /v1/responses, beside tools of OpenAI's server."""

import pytest

from mmengine import AsyncEngine
from tests.serve.test_serve_chat import JSON_TEMPLATE
from tests.server.running import served
from tests.server.test_server_agents import FUNCTION, LEFT_OUT


@pytest.fixture(scope="module")
def server():
    with served(AsyncEngine(), names=("shapes",), chat_template=JSON_TEMPLATE) as one:
        yield one


@pytest.fixture(scope="module")
def strict():
    with served(AsyncEngine(), names=("shapes",), chat_template=JSON_TEMPLATE, unsupported="strict") as one:
        yield one


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
