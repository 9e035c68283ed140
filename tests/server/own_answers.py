"""Checks the routes, statuses, content types, headers and bodies of answers against our OpenAPI document."""

import functools
import json
import re

import jsonschema

from mmengine.server.app.openapi import document
from tests.server.openai_answers import events_of, named_events

_NAMED = (
    (re.compile("/v1/models/.+"), "/v1/models/{name}"),
    (re.compile("/v1/responses/[^/]+"), "/v1/responses/{response_id}"),
    (re.compile("/v1/responses/[^/]+/cancel"), "/v1/responses/{response_id}/cancel"),
    (re.compile("/v1/responses/[^/]+/input_items"), "/v1/responses/{response_id}/input_items"),
    (re.compile("/v1/sessions/[^/]+"), "/v1/sessions/{session_id}"),
    (re.compile("/v1/sessions/[^/]+/append"), "/v1/sessions/{session_id}/append"),
    (re.compile("/v1/sessions/[^/]+/frame"), "/v1/sessions/{session_id}/frame"),
    (re.compile("/v1/sessions/[^/]+/ask"), "/v1/sessions/{session_id}/ask"),
    (re.compile("/v1/files/[^/]+"), "/v1/files/{file_id}"),
    (re.compile("/v1/files/[^/]+/content"), "/v1/files/{file_id}/content"),
    (re.compile("/v1/batches/[^/]+"), "/v1/batches/{batch_id}"),
    (re.compile("/v1/batches/[^/]+/cancel"), "/v1/batches/{batch_id}/cancel"),
)

# Headers that only some answers have.
SOMETIMES = ("x-mmengine-ignored-fields", "x-mmengine-unenforced-tools")


@functools.cache
def described():
    return json.loads(document())


@functools.cache
def _validator(reference):
    schema = {"$ref": reference, "components": described()["components"]}
    return jsonschema.Draft202012Validator(schema)


def check_own(path, method, status, headers, body):
    """Check an answer. `body`: a stream's text, or decoded JSON. A route that the document lacks may only
    return an error.
    """
    path = path.partition("?")[0]
    path = next((name for pattern, name in _NAMED if pattern.fullmatch(path)), path)
    found = described()["paths"].get(path, {})
    if method.lower() not in found:
        assert status in (401, 404, 405) or path == "/openapi.json"
        if status != 200:
            kind = "MessageRefusal" if path.startswith("/v1/messages") else "Refusal"
            _validator(f"#/components/schemas/{kind}").validate(body)
        return
    answers = found[method.lower()]["responses"]
    assert str(status) in answers, f"{method} {path} answers {status}, which the document lacks"
    answer = answers[str(status)]
    kind = headers["content-type"].split(";")[0]
    assert kind in answer["content"], f"{method} {path} answers {status} as {kind}"
    for name in answer.get("headers", ()):
        assert name in headers or name in SOMETIMES, f"{status} lacks {name}"
    if kind == "application/json":
        _validator(answer["content"][kind]["schema"]["$ref"]).validate(body)
    if kind == "text/event-stream":
        item = answer["content"][kind]["itemSchema"]["properties"]
        if "event" in item:
            _check_named(item, body)
            return
        kinds = [_validator(each["$ref"]) for each in item["data"]["anyOf"][1]["contentSchema"]["anyOf"]]
        for event in events_of(body)[:-1]:
            kinds["error" in json.loads(event)].validate(json.loads(event))


def _check_named(item, body):
    """Check each event against the schema for the event's name."""
    shapes = dict(zip(item["event"]["enum"], item["data"]["contentSchema"]["anyOf"], strict=True))
    for name, event in named_events(body):
        _validator(shapes[name]["$ref"]).validate(event)
