"""Tests of context_management in /v1/messages and /v1/responses: edits that remove nothing are accepted."""

import pytest

from mmengine import AsyncEngine
from mmengine.config import EngineConfig
from mmengine.server.messages.context_edits import check_context_management
from tests.serve.test_serve_chat import JSON_TEMPLATE
from tests.server.running import served

LIMIT = 4096
USE = {"type": "tool_use", "id": "t{}", "name": "area", "input": {}}
RESULT = {"type": "tool_result", "tool_use_id": "t{}", "content": "7"}
THOUGHT = {"type": "thinking", "thinking": "so", "signature": ""}
CLEAR, THINK, COMPACT = "clear_tool_uses_20250919", "clear_thinking_20251015", "compact_20260112"


def of(kind, value):
    return {"type": kind, "value": value}


def history(num_results, num_thoughts=0):
    """Return a history with `num_results` tool results and `num_thoughts` assistant turns with thinking."""
    turns = [{"role": "user", "content": "What is a triangle?"}]
    for n in range(num_results):
        turns.append({"role": "assistant", "content": [{**USE, "id": f"t{n}"}]})
        turns.append({"role": "user", "content": [{**RESULT, "tool_use_id": f"t{n}"}]})
    for _ in range(num_thoughts):
        turns.append({"role": "assistant", "content": [THOUGHT, {"type": "text", "text": "a"}]})
        turns.append({"role": "user", "content": "and a square?"})
    return turns


@pytest.fixture(scope="module", params=["lenient", "strict"])
def server(request):
    engine = AsyncEngine(config=EngineConfig(max_model_len=LIMIT))
    with served(engine, names=("shapes",), chat_template=JSON_TEMPLATE, unsupported=request.param) as one:
        yield one


def answers(server, turns, *edits):
    body = {"messages": turns, "context_management": {"edits": list(edits)}}
    counted = server.call("/v1/messages/count_tokens", body)
    return server.call("/v1/messages", {**body, "max_tokens": 2}), counted


@pytest.mark.parametrize(
    ("turns", "edit"),
    [
        (history(9), {"type": CLEAR}),  # Anthropic's default trigger is 100,000 tokens.
        (history(9), {"type": CLEAR, "trigger": of("input_tokens", LIMIT), "keep": of("tool_uses", 0)}),
        (history(0), {"type": CLEAR, "trigger": of("input_tokens", 1), "keep": of("tool_uses", 0)}),
        (history(3), {"type": CLEAR, "trigger": of("input_tokens", 1)}),
        (history(4), {"type": CLEAR, "trigger": of("input_tokens", 1), "keep": of("tool_uses", 4)}),
        (history(5), {"type": CLEAR, "trigger": of("tool_uses", 5), "keep": of("tool_uses", 1)}),
        (history(9), {"type": COMPACT}),
        (history(9), {"type": COMPACT, "trigger": of("input_tokens", 50_000), "instructions": "short"}),
        (history(2), {"type": THINK}),
        (history(2, 1), {"type": THINK}),
        (history(0, 3), {"type": THINK, "keep": of("thinking_turns", 3)}),
        (history(0, 3), {"type": THINK, "keep": {"type": "all"}}),
    ],
    ids=lambda each: str(each)[:60],
)
def test_edits_that_remove_nothing_are_accepted(server, turns, edit):
    for status, headers, answer in answers(server, turns, {"type": THINK, "keep": "all"}, edit):
        assert status == 200 and "x-mmengine-ignored-fields" not in headers, answer


@pytest.mark.parametrize(
    ("turns", "edit"),
    [
        (history(4), {"type": CLEAR, "trigger": of("input_tokens", LIMIT - 1)}),
        (history(4), {"type": CLEAR, "trigger": of("tool_uses", 3)}),
        (history(2), {"type": CLEAR, "trigger": of("tool_uses", 1), "keep": of("tool_uses", True)}),
        (history(2), {"type": CLEAR, "trigger": of("input_tokens", 1), "keep": of("turns", 9)}),
        (history(0), {"type": COMPACT, "trigger": of("input_tokens", LIMIT - 1)}),
        (history(0, 2), {"type": THINK}),
        (history(0, 3), {"type": THINK, "keep": of("thinking_turns", 2)}),
        (history(0, 1), {"type": THINK, "keep": "none"}),
        (history(0), {"type": "clear_all"}),
        (history(0), {"type": ["x"]}),
        (history(0), "clear"),
    ],
    ids=lambda each: str(each)[:60],
)
def test_other_edits_are_refused(server, turns, edit):
    for status, _, answer in answers(server, turns, {"type": THINK, "keep": "all"}, edit):
        assert status == 400 and answer["error"]["message"].startswith("context_management.edits[1] "), answer


@pytest.mark.parametrize("given", [{"edits": 3}, {"edits": {}}, {"edit": []}])
def test_malformed_context_management_is_refused(server, given):
    body = {"messages": history(0), "max_tokens": 2, "context_management": given}
    status, _, answer = server.call("/v1/messages", body)
    assert status == 400 and answer["error"]["message"].startswith("context_management "), answer


def test_the_messages_are_read_once_for_all_edits():
    class Turns(list):
        num_reads = 0

        def __iter__(self):
            self.num_reads += 1
            return super().__iter__()

    turns, trigger = Turns(history(3, 1)), of("input_tokens", 1)
    edits = [{"type": CLEAR, "trigger": trigger}, {"type": THINK}] * 20
    check_context_management({"edits": edits}, turns, LIMIT)
    assert turns.num_reads == 1


def test_a_block_whose_type_is_no_text_is_named(server):
    turns = [{"role": "user", "content": [{"type": ["x"]}]}]
    for status, _, answer in answers(server, turns, {"type": CLEAR, "trigger": of("input_tokens", 1)}):
        assert status == 400 and answer["error"]["message"].startswith("messages[0].content[0].type "), answer


@pytest.mark.parametrize(
    ("given", "param"),
    [
        ([], ""),
        ([{"type": "compaction", "compact_threshold": LIMIT}], ""),
        ([{"type": "compaction", "compact_threshold": LIMIT - 1}], "context_management[0]"),
        ([{"type": "compaction"}], "context_management[0]"),
        ([{"type": "compaction", "compact_threshold": 1e9}], "context_management[0]"),
        ([{"type": "other", "compact_threshold": LIMIT}], "context_management[0]"),
    ],
)
def test_a_compaction_that_never_begins_is_accepted(server, given, param):
    status, headers, answer = server.respond("hi", max_output_tokens=2, context_management=given)
    assert status == (400 if param else 200), answer
    assert "x-mmengine-ignored-fields" not in headers
    assert not param or answer["error"]["param"] == param
