"""Tests calls from coding agents and chat pages, with five calls from a conversation of ten for each client.

agent_turns.json has each client's fields, blocks and tools. In agent_turns.json, `{n}` stands for the turn's
number. agent_sizes.py replaces {system} and {result} with generated texts.
"""

import ast
import json
import re
from pathlib import Path

import pytest

from mmengine import AsyncEngine
from tests.clients.coding_agents import AGENTS
from tests.project.doc_blocks import ROOT
from tests.serve.test_serve_chat import JSON_TEMPLATE, SHAPES
from tests.server.agent_sizes import build_long, enlarge
from tests.server.responses_answers import check_events
from tests.server.running import served

TURNS = json.loads(Path(__file__).with_name("agent_turns.json").read_text())
CLIENTS = {name: enlarge(name, client) for name, client in TURNS.items()}
LEFT_OUT = "x-mmengine-ignored-fields"
NAMED = {"type": "tool", "name": "web_search"}
ASKED = [{"role": "user", "content": "What is a triangle?"}]
TOOL = {"name": "area", "description": "Of a shape.", "input_schema": SHAPES}
FUNCTION = {"type": "function", "name": "area", "parameters": SHAPES}
HOSTED = {"type": "web_search_20250305", "name": "web_search"}
BILLING = "x-anthropic-billing-header: cc_version=2.1.177.01c; cc_entrypoint=cli; cch={}6ee5;"


@pytest.fixture(scope="module")
def server():
    with served(AsyncEngine(), names=("shapes",), chat_template=JSON_TEMPLATE) as one:
        yield one


@pytest.fixture(scope="module")
def long():
    """A server for the prompts of real agents, with the included checkpoint's tokenizer."""
    with served(AsyncEngine(builder=build_long), names=("shapes",), chat_template=JSON_TEMPLATE) as one:
        yield one


@pytest.fixture(scope="module")
def strict():
    with served(AsyncEngine(), names=("shapes",), chat_template=JSON_TEMPLATE, unsupported="strict") as one:
        yield one


def message(server, **fields):
    body = {"max_tokens": 4, "messages": ASKED, "temperature": 0, **fields}
    return server.call("/v1/messages?beta=true", body)


def turns_of(client, number):
    """Return the client's messages before its call `number`."""
    turns = [json.dumps(client["turn"]).replace("{n}", str(n)) for n in range(number)]
    return [*client["first"], *(each for turn in turns for each in json.loads(turn))]


def usage_of(text):
    """Return the counts of prompt tokens and cached tokens in a stream."""
    cached = int(re.findall(r'"(?:cached_tokens|cache_read_input_tokens)": ?(\d+)', text)[-1])
    prompt = int(re.findall(r'"(?:prompt_tokens|input_tokens)": ?(\d+)', text)[-1])
    return prompt + cached * ("cache_read_input_tokens" in text), cached


@pytest.mark.parametrize("name", CLIENTS)
def test_ten_turns_of_each_client_are_answered(long, name):
    """Makes the first three and the last two of ten calls. The other calls would differ only in length."""
    client, last = CLIENTS[name], 0
    for number in (*range(3), 8, 9):
        body = json.loads(json.dumps(client["body"]).replace("{n}", str(number)))
        body[client["key"]] = turns_of(client, number)
        status, headers, text = long.call(client["path"], body, client.get("headers"))
        assert status == 200, text
        assert headers["content-type"].startswith("text/event-stream")
        if name != "aider":  # aider does not request the usage.
            num_tokens, num_cached = usage_of(text)
            assert num_cached >= 0.9 * last  # The previous prompt is a prefix, except for its last tokens.
            last = num_tokens
        if name == "claude-code":
            assert headers[LEFT_OUT] == "tools[2].type (web_search_20250305)"
        elif name == "codex":
            hosted = (
                "tools[2].type (web_search)",
                "tools[3].type (namespace)",
                "tools[4].type (local_shell)",
            )
            assert all(each in headers[LEFT_OUT] for each in ("client_metadata", "access_programs", *hosted))
        else:
            assert LEFT_OUT not in headers


def test_prompts_have_the_sizes_of_real_agents():
    for name, client in CLIENTS.items():
        size, tools = len(json.dumps(turns_of(client, 9))), client["body"].get("tools", [])
        assert 30_000 < size < 150_000, name
        assert not tools or (15 <= len(tools) <= 30 and len(json.dumps(tools)) > 18_000), name


@pytest.mark.parametrize("keep", ["all", {"type": "all"}])
def test_context_management_that_removes_nothing_is_accepted(server, strict, keep):
    edits = [{"type": "clear_thinking_20251015", "keep": keep}]
    for one in (server, strict):
        for management in ({"edits": edits}, {"edits": []}, {"edits": None}, {}):
            assert message(one, context_management=management)[0] == 200
        counted = {"messages": ASKED, "context_management": {"edits": edits}}
        assert one.call("/v1/messages/count_tokens", counted)[0] == 200


@pytest.mark.parametrize(
    ("fields", "where"),
    [
        ({"context_management": {"edits": [{"type": "clear_all"}]}}, "context_management.edits[0]"),
        (
            {"tools": [HOSTED, TOOL], "tool_choice": {"type": "tool", "name": "web_search"}},
            "tool_choice.name",
        ),
        ({"tools": [HOSTED]}, "tools[0].type"),
        ({"tools": [HOSTED, {**HOSTED, "name": "b"}]}, "tools"),
        ({"tools": [HOSTED, {**TOOL, "input_schema": 3}]}, "tools[1].input_schema"),
        ({"tools": [HOSTED, {**TOOL, "name": "a b"}]}, "tools[1].name"),
        ({"output_config": {"format": {"type": "xml"}}}, "output_config.format.type"),
        ({"guided_json": {}}, "guided_json"),
    ],
)
def test_what_decides_about_the_answer_stays_refused(server, fields, where):
    # A lenient server still refuses fields that would change the answer.
    status, _, answer = message(server, **fields)
    assert status == 400 and answer["error"]["message"].startswith(where)


HISTORY = [
    {"type": "server_tool_use", "id": "s", "name": "web_search", "input": {"query": "a"}},
    {"type": "web_search_tool_result", "tool_use_id": "s", "content": []},
    {"type": "mcp_tool_use", "id": "m", "name": "a", "server_name": "b", "input": {}},
    {"type": "mcp_tool_result", "tool_use_id": "m", "content": "a"},
    {"type": "bash_code_execution_tool_result", "tool_use_id": "m", "content": {}},
]
ITEMS = [
    {"type": "web_search_call", "id": "ws_1", "status": "completed"},
    {"type": "local_shell_call", "call_id": "a", "action": {"type": "exec", "command": ["ls"]}},
    {"type": "local_shell_call_output", "call_id": "a", "output": "b"},
    {"type": "mcp_list_tools", "server_label": "a", "tools": []},
    {"type": "tool_search_output", "call_id": "a", "tools": []},
    {"type": "ghost_snapshot", "ghost_commit": {}},
]


def test_records_of_hosted_tools_in_the_history_are_left_out_and_named(server, strict):
    """A conversation from the vendor's server continues on this server."""
    said = {"type": "text", "text": "A shape."}
    plain = [*ASKED, {"role": "assistant", "content": [said]}, *ASKED]
    for kinds in (HISTORY, HISTORY[:1]):
        turns = [*ASKED, {"role": "assistant", "content": [*kinds, said]}, *ASKED]
        status, headers, answer = message(server, messages=turns)
        places = [f"messages[1].content[{n}].type ({each['type']})" for n, each in enumerate(kinds)]
        assert status == 200 and headers[LEFT_OUT] == ", ".join(places)
        assert answer["content"] == message(server, messages=plain)[2]["content"]
        assert message(strict, messages=turns)[0] == 400
    own = {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "A shape."}]}
    status, headers, answer = server.respond([*ASKED, *ITEMS, own, *ASKED], temperature=0, store=False)
    assert status == 200, answer
    assert headers[LEFT_OUT] == ", ".join(
        f"input[{n}].type ({each['type']})" for n, each in enumerate(ITEMS, 1)
    )
    _, _, expected = server.respond([*ASKED, own, *ASKED], temperature=0, store=False)
    assert answer["output"][0]["content"] == expected["output"][0]["content"]
    assert strict.respond([*ASKED, *ITEMS], store=False)[0] == 400


def test_other_unknown_blocks_and_items_stay_refused(server):
    for kind in ("compaction", "container_upload", "later", "_tool_result", "tool_result", None, 3):
        turns = [*ASKED, {"role": "assistant", "content": [{"type": kind}]}, *ASKED]
        assert message(server, messages=turns)[0] == 400
    for kind in ("compaction", "later", "later_call", "function_call_item", None, 3):
        assert server.respond([*ASKED, {"type": kind}], store=False)[0] == 400
    status, _, answer = server.respond(ITEMS, store=False)
    assert (status, answer["error"]["param"]) == (400, "input")
    assert "no message and no call" in answer["error"]["message"]
    for content in (HISTORY, []):
        status, _, answer = message(server, messages=[{"role": "user", "content": content}])
        assert status == 400 and answer["error"]["message"].startswith("messages contain no block"), content


def test_documents_of_text_are_read(server, strict):
    cited = {"citations": {"enabled": True}}
    plain = {"type": "text", "media_type": "text/plain", "data": "Red."}
    parts = [{"type": "text", "text": "Red."}]
    for block, text in (
        ({"type": "document", "source": plain, "title": "A", "context": "B"}, "A\nB\nRed."),
        ({"type": "document", "source": plain, "title": None, **cited}, "Red."),
        ({"type": "document", "source": {"type": "content", "content": parts * 2}}, "Red.\nRed."),
        ({"type": "document", "source": {"type": "content", "content": "Red."}}, "Red."),
        ({"type": "search_result", "source": "B", "title": "A", "content": parts}, "A\nB\nRed."),
    ):
        for wrapped in (
            lambda one: one,
            lambda one: {"type": "tool_result", "tool_use_id": "a", "content": [one]},
        ):
            found, expected = (
                message(server, messages=[*ASKED, {"role": "user", "content": [wrapped(each)]}])
                for each in (block, {"type": "text", "text": text})
            )
            assert found[0] == 200 and found[2]["content"] == expected[2]["content"]
            usage = [
                sum(each[2]["usage"][name] for name in ("input_tokens", "cache_read_input_tokens"))
                for each in (found, expected)
            ]
            assert usage[0] == usage[1]
            assert ("citations" in found[1].get(LEFT_OUT, "")) == ("citations" in block)
    pdf = {"type": "base64", "media_type": "application/pdf", "data": "JVBERi0="}
    for block, where in (
        ({"type": "document", "source": pdf}, "source.type"),
        ({"type": "document"}, "source.type"),
        ({"type": "document", "source": {**plain, "data": 3}}, "source.data"),
        (
            {"type": "document", "source": {"type": "content", "content": [{"type": "image"}]}},
            "source.content[0]",
        ),
        ({"type": "search_result", "content": 3}, "content[0]"),
        ({"type": "search_result", "content": parts, "source": 3}, "source"),
    ):
        status, _, answer = message(server, messages=[{"role": "user", "content": [block]}])
        assert status == 400 and answer["error"]["message"].startswith(f"messages[0].content[0].{where} "), (
            answer
        )
    block = {"type": "document", "source": plain, **cited}
    assert message(strict, messages=[{"role": "user", "content": [block]}])[0] == 400


def test_unknown_fields_of_a_function_are_left_out_and_named(server, strict):
    tool = {**FUNCTION, "defer_loading": True, "output_schema": {}}
    status, headers, answer = server.respond(tools=[tool], tool_choice="none")
    assert status == 200, answer
    assert headers[LEFT_OUT] == "tools[0].defer_loading, tools[0].output_schema"
    status, _, answer = strict.respond(tools=[tool])
    assert (status, answer["error"]["param"]) == (400, "tools[0].defer_loading")


def test_unknown_fields_are_left_out_and_named(server, strict):
    for fields, name in (
        ({"betas": ["a"]}, "betas"),
        ({"thinking": {"type": "adaptive", "later": 1}}, "thinking.later"),
        ({"output_config": {"task_budget": {}}}, "output_config.task_budget"),
        ({"mcp_servers": [{"type": "url"}]}, "mcp_servers"),
        ({"messages": [{**ASKED[0], "id": "a"}]}, "messages[0].id"),
        ({"tools": [{**TOOL, "later": 1}]}, "tools[0].later"),
        ({"tools": [HOSTED, TOOL]}, "tools[0].type"),
    ):
        status, headers, answer = message(server, **fields)
        assert status == 200 and headers[LEFT_OUT].startswith(name)
        status, _, answer = message(strict, **fields)
        assert status == 400 and name in answer["error"]["message"]
    assert server.chat(betas=["a"])[0] == 400  # Chat completions have no lenient mode.


@pytest.mark.parametrize("as_text", [False, True])
def test_the_billing_line_does_not_change_the_prompt(server, as_text):
    # Claude Code's system prompt begins with a billing line that differs in each call. The server removes it.
    rule = "Be brief. " * 30

    def usage(system):
        return message(server, system=system)[2]["usage"]

    def system(number):
        if as_text:
            return f"{BILLING.format(number)}\n{rule}"
        return [{"type": "text", "text": text} for text in (BILLING.format(number), rule)]

    first, second, plain = usage(system(1)), usage(system(2)), usage(system(3)[1:] if not as_text else rule)
    total = first["input_tokens"] + first["cache_read_input_tokens"]
    assert second["cache_read_input_tokens"] > total - 20 and second == plain


def test_a_custom_tool_is_called_with_text(server):
    regex = {"type": "grammar", "syntax": "regex", "definition": "a{2,5}"}
    custom = {"type": "custom", "name": "patch", "description": "Changes.", "format": regex}
    fields = {
        "tools": [FUNCTION, custom],
        "tool_choice": {"type": "custom", "name": "patch"},
        "temperature": 0,
    }
    status, _, answer = server.respond(**fields)
    assert status == 200, answer
    (call,) = answer["output"]
    assert call["type"] == "custom_tool_call" and set(call["input"]) == {"a"} and 2 <= len(call["input"]) <= 5
    status, _, text = server.respond(**fields, stream=True)
    *_, last = check_events(text)
    assert last["response"]["output"][0]["input"] == call["input"]
    assert "response.custom_tool_call_input.done" in text


PATCH = """start: begin_patch hunk+ end_patch
begin_patch: "*** Begin Patch" LF
end_patch: "*** End Patch" LF?

hunk: add_hunk | delete_hunk
add_hunk: "*** Add File: " filename LF add_line+
delete_hunk: "*** Delete File: " filename LF
filename: /[a-z"\\\\]{1,4}/
add_line: "+" /(.{0,3})/ LF -> line

%import common.LF
"""


def lark_tool(definition):
    form = {"type": "grammar", "syntax": "lark", "definition": definition}
    return {"type": "custom", "name": "apply_patch", "description": "Changes files.", "format": form}


def test_a_lark_grammar_restricts_a_custom_tools_input(server, strict):
    fields = {
        "tools": [FUNCTION, lark_tool(PATCH)],
        "tool_choice": {"type": "custom", "name": "apply_patch"},
        "temperature": 1.3,
        "max_output_tokens": 900,
    }
    for seed, one in enumerate((server, strict)):
        status, headers, answer = one.respond(**fields, seed=seed)
        assert status == 200 and LEFT_OUT not in headers, answer
        (call,) = answer["output"]
        assert call["type"] == "custom_tool_call" and call["name"] == "apply_patch"
        if answer["status"] == "completed":
            head, *hunks, tail = call["input"].removesuffix("\n").split("\n")
            assert head == "*** Begin Patch" and tail == "*** End Patch" and hunks
            line = re.compile(r'\*\*\* (Add|Delete) File: [a-z"\\\\]{1,4}|\+.{0,3}')
            assert all(map(line.fullmatch, hunks))


def test_a_lark_grammar_that_is_not_supported_is_left_out_or_refused(server, strict):
    for definition in ('start: "a"\n%ignore " "', "start: nothing", 'start: "a" & /b/', "x"):
        fields = {"tools": [FUNCTION, lark_tool(definition)], "tool_choice": "none"}
        status, headers, answer = server.respond(**fields)
        assert status == 200, answer
        assert headers[LEFT_OUT] == "tools[1].format.definition (lark, not enforced)"
        status, _, answer = strict.respond(**fields)
        assert status == 400 and answer["error"]["param"] == "tools[1].format.definition", answer


def test_agents_recognise_a_prompt_that_is_too_long(server):
    """Claude Code reads the prompt's length and the limit from the message, and compacts its conversation."""
    text = "word " * 5000
    for status, _, answer in (
        message(server, messages=[{"role": "user", "content": text}]),
        server.chat(text),
        server.respond(text),
    ):
        found = re.search(r"prompt is too long[^0-9]*(\d+)\s*tokens?\s*>\s*(\d+)", answer["error"]["message"])
        assert status == 400 and int(found[1]) > int(found[2]) > 4000


def test_a_choice_of_a_hosted_tool_is_refused(server):
    hosted = {"type": "web_search"}
    status, _, answer = server.respond(tools=[FUNCTION, hosted], tool_choice=hosted)
    assert status == 400 and answer["error"]["param"] == "tool_choice.type"
    for tools in ([hosted], [hosted, {"type": "local_shell"}]):
        assert server.respond(tools=tools)[0] == 400
    assert server.respond(text={"format": {"type": "xml"}})[0] == 400


def test_no_program_of_a_client_hides_a_package_that_it_imports():
    """Python searches a program's own folder first."""
    programs = list((ROOT / "tests" / "clients").glob("*.py"))
    ours = {program.stem for program in programs} - {"checks"}
    for program in programs:
        for node in ast.walk(ast.parse(program.read_text())):
            names = [each.name for each in node.names] if isinstance(node, ast.Import) else []
            names += [node.module] if isinstance(node, ast.ImportFrom) else []
            assert not ours & {name.partition(".")[0] for name in names}, program.name


def test_the_page_has_the_commands_that_were_run():
    # docs/how-to/agents.md has each agent's version, flags and environment variables, except variables that
    # turn off telemetry and updates.
    page = (ROOT / "docs" / "how-to" / "agents.md").read_text()
    for agent in AGENTS:
        assert re.search(rf"`{agent.package}`\) \| {re.escape(agent.version)} \|", page), agent.package
        words = [each for each in (*agent.setup, *agent.command) if each.startswith("-")]
        variables = [name for name in agent.environment if not re.search("DISABLE|ANALYTICS|UPDATE", name)]
        for word in (*words, *variables):
            assert word in page, (agent.package, word)
