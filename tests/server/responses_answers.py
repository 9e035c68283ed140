"""Checks answers of the Responses API against OpenAI's description, and the order of stream events.
tests/server/running.py calls these checks for each answer.
"""

import functools
import json

from tests.server.openai_answers import check, named_events
from tests.server.openai_schemas import PAGE

RESPONSES = "/v1/responses"
ENDS = ("response.completed", "response.incomplete", "response.failed")
PARTS = {
    "output_text": "text",
    "reasoning_text": "text",
    "function_call_arguments": "arguments",
    "custom_tool_call_input": "input",
}


@functools.cache
def _schemas():
    """Return a dict from event types to the names of their schemas."""
    schemas = json.loads(PAGE.read_text())["schemas"]
    names = [each["$ref"].rpartition("/")[2] for each in schemas["ResponseStreamEvent"]["anyOf"]]
    return {schemas[name]["properties"]["type"]["enum"][0]: name for name in names}


def check_response(status, body):
    """Check an unstreamed response or an error."""
    if status != 200:
        check(body, "ErrorResponse")
        return
    check(body, "Response")
    ids = [item["id"] for item in body["output"]]
    assert len(set(ids)) == len(ids)
    cut = [item.get("status") == "incomplete" for item in body["output"]]
    has_status = all("status" in item for item in body["output"])  # OpenAI's custom_tool_call has none.
    assert (body["status"] == "incomplete") == any(cut) or not has_status
    assert not any(cut[:-1])
    assert (body["incomplete_details"] is not None) == (body["status"] == "incomplete")
    assert (body["error"] is not None) == (body["status"] == "failed")


def check_events(text):
    """Check a complete stream: each event, the events' order, and that the deltas add up to the response.
    Return the events.
    """
    events = [event for _, event in named_events(text)]
    for event in events:
        check(event, _schemas()[event["type"]])
    *told, last = events
    if last["type"] == "error":
        assert last["sequence_number"] == told[-1]["sequence_number"]
        events = told
    else:
        assert last["type"] in ENDS
        check_response(200, last["response"])
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    begin = [event["type"] for event in events[:3]]
    queued = ["response.queued"] if "response.queued" in begin else []
    assert begin[: 2 + len(queued)] == ["response.created", *queued, "response.in_progress"]
    assert len({event["response"]["id"] for event in events if "response" in event}) == 1
    items = _items(events[2 + len(queued) :])
    if last["type"] in ENDS[:2]:
        assert last["response"]["output"] == items
    return events


def _items(events):
    """Check the events of output items, and return the complete items. Items must not overlap, and only the
    last item may be incomplete.
    """
    done, item, texts = [], None, []
    for event in events:
        kind = event["type"].removeprefix("response.")
        if event["type"] in ENDS:
            assert item is None or kind == "failed"
            break
        if kind == "output_item.added":
            assert item is None and event["output_index"] == len(done)
            item, texts = event["item"], []
            continue
        assert item is not None and event["output_index"] == len(done)
        assert event.get("item_id", item["id"]) == item["id"]
        what, _, step = kind.partition(".")
        if step == "delta":
            assert event["delta"]
            texts.append(event["delta"])
        elif what in PARTS:
            assert event[PARTS[what]] == "".join(texts)
        elif kind == "content_part.done":
            assert event["part"]["text"] == "".join(texts)
        elif kind == "output_item.done":
            end = event["item"]
            assert {name: end[name] for name in ("id", "type")} == {
                name: item[name] for name in ("id", "type")
            }
            texts_of = [end[name] for name in ("arguments", "input") if name in end]
            whole = texts_of[0] if texts_of else end["content"][0]["text"]
            assert whole == "".join(texts)
            done.append(end)
            item = None
    return done
