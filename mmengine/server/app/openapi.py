"""What the server takes and says, as an OpenAPI document: of the structs and tables that read bodies, and of
the shapes that answers are held to."""

from collections.abc import Sequence
from functools import cache

import msgspec

from mmengine.server.app.adapter_routes import LOAD, UNLOAD, AdapterDone, LoadBody, UnloadBody
from mmengine.server.batches.routes import BatchBody
from mmengine.server.batches.schemas import (
    BatchObject,
    BatchObjects,
    FileDeleted,
    FileObject,
    FileObjects,
    Upload,
    described_upload,
)
from mmengine.server.chat.chat_reader import ChatBody
from mmengine.server.chat.completion_reader import CompletionBody
from mmengine.server.chat.parsed_request import Json
from mmengine.server.chat.response_schemas import (
    Alive,
    ChatAnswer,
    ChatEvent,
    Health,
    ModelCard,
    Models,
    Refusal,
    Text,
    TextAnswer,
    TextEvent,
    Tokens,
    Version,
)
from mmengine.server.chat.token_requests import DetokenizeBody, TokenizeBody
from mmengine.server.http.body_fields import CHAT, COMPLETION, DETOKENIZE, TOKENIZE, Field
from mmengine.server.http.errors import STATUSES
from mmengine.server.messages.body import CountBody, MessagesBody
from mmengine.server.messages.errors import OVERLOADED
from mmengine.server.messages.shapes import MESSAGE_EVENTS, InputTokenCount, MessageAnswer, MessageRefusal
from mmengine.server.messages.table import COUNT_TOKENS, MESSAGES
from mmengine.server.responses.body import ResponsesBody
from mmengine.server.responses.shapes import EVENTS, InputItems, Response, ResponseDeleted
from mmengine.server.responses.table import RESPONSES
from mmengine.server.sessions.bodies import (
    AppendBody,
    AskBody,
    FrameBody,
    SessionBody,
    SessionDeleted,
    SessionObject,
    SessionObjects,
)
from mmengine.version import __version__

_REF = "#/components/schemas/{name}"
NOT_DONE = "not done:"  # how the description of a field begins that asks for nothing at most
_READS = (401, 405, 408, 413, 415, 429, 431, 500, 503)  # of a route that reads a body
_ASKS = (401, 404, 405, 431, 500)  # of one that reads none
_LATER = ("retry-after",)
_HEADERS = {405: ("allow",), 429: _LATER, 503: _LATER, OVERLOADED: _LATER}
_Kind = type[msgspec.Struct]
_BODIES: dict[_Kind, tuple[Field, ...]] = {
    ChatBody: CHAT,
    CompletionBody: COMPLETION,
    ResponsesBody: RESPONSES,
    MessagesBody: MESSAGES,
    CountBody: COUNT_TOKENS,
    TokenizeBody: TOKENIZE,
    DetokenizeBody: DETOKENIZE,
}


def _query(name: str) -> Json:
    return {"name": name, "in": "query", "required": False, "schema": {"type": "string"}}


_PAGES = [_query(name) for name in ("after", "limit", "order")]


@cache
def document() -> bytes:
    """As JSON."""
    kinds: tuple[_Kind, ...] = (*_BODIES, ChatEvent, TextEvent, *EVENTS, *MESSAGE_EVENTS, Refusal)
    said = (ChatAnswer, TextAnswer, Response, Models, ModelCard, Tokens, Text, Health, Alive, Version)
    kinds += (
        MessageAnswer,
        InputTokenCount,
        InputItems,
        ResponseDeleted,
        FileObject,
        FileObjects,
        FileDeleted,
        BatchBody,
        BatchObject,
        BatchObjects,
        Upload,
        LoadBody,
        UnloadBody,
        AdapterDone,
        *(SessionBody, AppendBody, FrameBody, AskBody, SessionObject, SessionObjects, SessionDeleted),
    )
    _, schemas = msgspec.json.schema_components((*kinds, *said), schema_hook=_of_anything, ref_template=_REF)
    for kind, fields in _BODIES.items():
        _describe(schemas[kind.__name__], fields)
    described_upload(schemas[Upload.__name__])
    return msgspec.json.encode(
        {
            "openapi": "3.1.0",
            "info": {"title": "mmengine", "version": __version__},
            "paths": _paths(),
            "components": {
                "schemas": schemas,
                "securitySchemes": {
                    "bearer": {"type": "http", "scheme": "bearer"},
                    "key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
                },
            },
            "security": [{"bearer": []}, {"key": []}, {}],
        }
    )


def _paths() -> Json:
    ready = {**_ok("Ready", Health), "503": _answer("Not ready, and why", Health, ("retry-after",))}
    return {
        "/v1/chat/completions": {
            "post": _answering("Answer a conversation", ChatBody, ChatAnswer, _chunks(ChatEvent))
        },
        "/v1/completions": {
            "post": _answering("Go on with texts", CompletionBody, TextAnswer, _chunks(TextEvent))
        },
        "/v1/responses": {
            "post": _answering("Answer a conversation, in items", ResponsesBody, Response, _by_name(EVENTS))
        },
        **_message_paths(),
        **_adapter_paths(),
        "/v1/models": {"get": _route("The served names", _ok("Models", Models), _ASKS)},
        "/v1/models/{name}": {
            "get": {**_route("One of them", _ok("A model", ModelCard), _ASKS), "parameters": [_named("name")]}
        },
        "/tokenize": {
            "post": {
                **_route("Tokens of a prompt, or of messages", _ok("Tokens", Tokens), (400, 404, *_READS)),
                "requestBody": _body(TokenizeBody),
            }
        },
        "/detokenize": {
            "post": {
                **_route("The text of tokens", _ok("The text", Text), (400, 404, *_READS)),
                "requestBody": _body(DetokenizeBody),
            }
        },
        "/health": {"get": {**_route("Ready, or why not", ready, (405, 431, 500)), "security": []}},
        "/health/ready": {"get": {**_route("Ready, or why not", ready, (405, 431, 500)), "security": []}},
        "/health/live": {
            "get": {
                **_route("The event loop answers", _ok("It does", Alive), (405, 431, 500)),
                "security": [],
            }
        },
        "/metrics": {
            "get": _route(
                "Prometheus' text format",
                {
                    "200": {
                        "description": "Metrics",
                        "content": {"text/plain": {"schema": {"type": "string"}}},
                    }
                },
                _ASKS,
            )
        },
        "/version": {"get": _route("The version", _ok("It", Version), _ASKS)},
        **_session_paths(),
        **_kept_paths(),
    }


def _message_paths() -> Json:
    events, statuses = _by_name(MESSAGE_EVENTS), (400, 404, OVERLOADED, *_READS)
    says = "Answer a conversation, as Anthropic's API does"
    answering = _answering(says, MessagesBody, MessageAnswer, events, MessageRefusal)
    counted = _ok("The number", InputTokenCount)
    counting = _route("Tokens that its conversation has", counted, statuses, MessageRefusal)
    return {
        "/v1/messages": {"post": answering},
        "/v1/messages/count_tokens": {"post": {**counting, "requestBody": _body(CountBody)}},
    }


def _adapter_paths() -> Json:
    """With an admin key, which is another than those of calls."""
    done, statuses = _ok("It is done", AdapterDone), (400, 403, *_READS)
    loading = _route("Load a LoRA adapter", done, statuses)
    unloading = _route("Unload one", done, (404, *statuses))
    return {
        LOAD: {"post": {**loading, "requestBody": _body(LoadBody)}},
        UNLOAD: {"post": {**unloading, "requestBody": _body(UnloadBody)}},
    }


def _session_paths() -> Json:
    """Requests that grow."""
    one = {"parameters": [_named("session_id")]}
    session, statuses = _ok("The session", SessionObject), (400, 404, 409, *_READS)
    asking = _answering("Ask it, and answer as chat does", AskBody, ChatAnswer, _chunks(ChatEvent))
    named = asking["parameters"]
    assert isinstance(named, list)
    named.append(_named("session_id"))
    made = {**_route("Open a session", session, statuses), "requestBody": _body(SessionBody)}
    listed = _route("The caller's sessions", _ok("All of them", SessionObjects), (*_ASKS, 503))
    gone = _route("Close it", _ok("It is gone", SessionDeleted), (*_ASKS, 503))
    below = "/v1/sessions/{session_id}"
    grown = {
        f"{below}/{way}": {
            "post": {**_route(says, session, statuses), "requestBody": _body(body), **one},
        }
        for way, says, body in (
            ("append", "Append texts, images and videos", AppendBody),
            ("frame", "Append a frame of a video", FrameBody),
        )
    }
    return {
        "/v1/sessions": {"post": made, "get": listed},
        below: {
            "get": {**_route("It as it is now", session, (*_ASKS, 503)), **one},
            "delete": {**gone, **one},
        },
        **grown,
        f"{below}/ask": {"post": asking},
    }


def _kept_paths() -> Json:
    """What is kept beside a log; without one, all of it is 404."""
    content: Json = {"application/octet-stream": {"schema": {"type": "string"}}}
    bytes_of: Json = {"200": {"description": "Its bytes", "content": content}}
    listed, named, made = (400, *_ASKS), (*_ASKS, 503), (400, 404, *_READS)
    upload: Json = {"content": {"multipart/form-data": {"schema": _of(Upload)}}, "required": True}
    file, batch = {"parameters": [_named("file_id")]}, {"parameters": [_named("batch_id")]}
    response = {"parameters": [_named("response_id")]}
    again = [_named("response_id"), _query("stream"), _query("starting_after")]
    found = _answer("It as it is now, or with stream true its events", Response)
    assert isinstance(found["content"], dict)
    found["content"]["text/event-stream"] = _events(_by_name(EVENTS))
    return {
        "/v1/responses/{response_id}": {
            "get": {**_route("A stored response", {"200": found}, (429, *listed, 503)), "parameters": again},
            "delete": {**_route("Delete it", _ok("It is gone", ResponseDeleted), named), **response},
        },
        "/v1/responses/{response_id}/cancel": {
            "post": {**_route("Cancel it", _ok("The response", Response), named), **response},
        },
        "/v1/responses/{response_id}/input_items": {
            "get": {
                **_route("What it was asked", _ok("A page", InputItems), (*listed, 503)),
                "parameters": [_named("response_id"), _query("order"), *_PAGES],
            },
        },
        "/v1/files": {
            "post": {**_route("Upload a file", _ok("The file", FileObject), made), "requestBody": upload},
            "get": {
                **_route("The caller's files", _ok("A page", FileObjects), listed),
                "parameters": [_query("purpose"), *_PAGES],
            },
        },
        "/v1/files/{file_id}": {
            "get": {**_route("One of them", _ok("The file", FileObject), _ASKS), **file},
            "delete": {**_route("Delete it", _ok("It is gone", FileDeleted), (409, *named)), **file},
        },
        "/v1/files/{file_id}/content": {"get": {**_route("Its bytes", bytes_of, _ASKS), **file}},
        "/v1/batches": {
            "post": {
                **_route("Answer a file of requests", _ok("The batch", BatchObject), (409, 422, *made)),
                "requestBody": _body(BatchBody),
            },
            "get": {
                **_route("The caller's batches", _ok("A page", BatchObjects), listed),
                "parameters": _PAGES,
            },
        },
        "/v1/batches/{batch_id}": {"get": {**_route("One", _ok("The batch", BatchObject), _ASKS), **batch}},
        "/v1/batches/{batch_id}/cancel": {
            "post": {**_route("Cancel it", _ok("The batch", BatchObject), (409, *named)), **batch},
        },
    }


def _named(name: str) -> Json:
    return {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}


def _of_anything(kind: type) -> dict[str, object]:
    """The schema of `object`, which any value is."""
    if kind is object:
        return {"description": "any JSON"}
    raise NotImplementedError


def _describe(schema: dict[str, object], fields: tuple[Field, ...]) -> None:
    """Say of each field what its table says; no other is taken, and null is absence."""
    properties = schema["properties"]
    assert isinstance(properties, dict)
    for field in fields:
        if field.name in properties:
            properties[field.name]["description"] = field.says
        elif field.how == "ignored":
            properties[field.name] = {"description": field.says}
        else:
            only = [value for value in field.neutral if not isinstance(value, list)]
            lists = [{"const": value} for value in field.neutral if isinstance(value, list)]
            properties[field.name] = {
                "description": f"{NOT_DONE} {field.says}",
                "anyOf": [{"enum": [*only, None]}, *lists],
            }
    schema["additionalProperties"] = {"type": "null"}


def _route(summary: str, responses: Json, statuses: tuple[int, ...], refusal: _Kind = Refusal) -> Json:
    """What is said below all routes, of a head that is too large, is the same for all of them."""
    refusals = {
        str(status): _answer(
            STATUSES[status], Refusal if status == 431 else refusal, _HEADERS.get(status, ())
        )
        for status in sorted(statuses)
    }
    return {"summary": summary, "responses": {**refusals, **responses}}


def _body(kind: _Kind) -> Json:
    return {"required": True, "content": {"application/json": {"schema": _of(kind)}}}


def _of(kind: _Kind) -> Json:
    return {"$ref": _REF.format(name=kind.__name__)}


def _ok(description: str, kind: _Kind) -> Json:
    return {"200": _answer(description, kind)}


def _answer(description: str, kind: _Kind, headers: tuple[str, ...] = ()) -> Json:
    found: Json = {"description": description, "content": {"application/json": {"schema": _of(kind)}}}
    if headers:
        found["headers"] = {name: {"schema": {"type": "string"}} for name in headers}
    return found


def _json_in(*kinds: _Kind) -> Json:
    """A string that holds one of these."""
    anything = {"anyOf": [_of(kind) for kind in kinds]}
    return {"type": "string", "contentMediaType": "application/json", "contentSchema": anything}


def _chunks(event: _Kind) -> Json:
    return {"data": {"anyOf": [{"const": "[DONE]"}, _json_in(event, Refusal)]}}


def _events(event: Json) -> Json:
    """Of each event, in the words of OpenAPI 3.2."""
    return {"itemSchema": {"type": "object", "properties": event}}


def _by_name(events: Sequence[_Kind]) -> Json:
    """Events that stand under their names."""
    return {"event": {"enum": [each.__struct_config__.tag for each in events]}, "data": _json_in(*events)}


def _answering(summary: str, body: _Kind, answer: _Kind, event: Json, refusal: _Kind = Refusal) -> Json:
    """A route of answers; `event` is what a stream has instead, property by property."""
    said = _answer("The answer, or with stream true its events", answer, ("x-request-id",))
    more = () if refusal is Refusal else (OVERLOADED,)
    content = said["content"]
    assert isinstance(content, dict)
    content["text/event-stream"] = _events(event)
    dropped = {"schema": {"type": "string"}, "description": "with --unknown-fields ignore: what was dropped"}
    headers = said["headers"]
    assert isinstance(headers, dict)
    headers["x-mmengine-ignored-fields"] = dropped
    unenforced = {"schema": {"type": "string"}, "description": "tools that are not held to their schemas"}
    headers["x-mmengine-unenforced-tools"] = unenforced
    return {
        **_route(summary, {"200": said}, (400, 404, 409, 422, 504, *more, *_READS), refusal),
        "requestBody": _body(body),
        "parameters": [
            {
                "name": "x-request-id",
                "in": "header",
                "required": False,
                "description": "what the answer's id is made of, unless the body has a request_id",
                "schema": {"type": "string", "pattern": "^[!-~]{0,128}$"},
            }
        ],
    }
