"""Renders the OpenAPI document from routes, body structs, field tables and response schemas."""

import asyncio
import re
from collections.abc import Iterator, Sequence
from functools import cache

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp

from mmengine.server.app.route_table import ALL_ROUTES
from mmengine.server.batches.schemas import Upload, described_upload
from mmengine.server.chat.bodies import ChatBody, CompletionBody, DetokenizeBody, TokenizeBody
from mmengine.server.chat.field_tables import CHAT, COMPLETION, DETOKENIZE, TOKENIZE
from mmengine.server.chat.response_schemas import Refusal
from mmengine.server.http.body_fields import Field, fields_of
from mmengine.server.http.error_table import STATUSES
from mmengine.server.http.errors import Json
from mmengine.server.http.route_records import HEADERS, Body, Operation, RouteRecord, Stream, parameter
from mmengine.server.messages.body import CountBody, MessagesBody
from mmengine.server.messages.field_table import COUNT_TOKENS, MESSAGES
from mmengine.server.pooling.bodies import EmbeddingBody, PoolingBody, RerankBody, ScoreBody
from mmengine.server.responses.body import ResponsesBody
from mmengine.server.responses.field_table import RESPONSES
from mmengine.version import __version__

_REF = "#/components/schemas/{name}"
_PATH_PARAMETER = re.compile(r"\{(\w+)(?::path)?\}")
NOT_DONE = "not done:"  # The descriptions of unsupported fields begin with this text.
_BODIES: dict[Body, tuple[Field, ...]] = {
    ChatBody: CHAT,
    CompletionBody: COMPLETION,
    ResponsesBody: RESPONSES,
    MessagesBody: MESSAGES,
    CountBody: COUNT_TOKENS,
    TokenizeBody: TOKENIZE,
    DetokenizeBody: DETOKENIZE,
    **{kind: fields_of(kind) for kind in (EmbeddingBody, PoolingBody, RerankBody, ScoreBody)},
}


@cache
def document() -> bytes:
    """Return the OpenAPI document as JSON."""
    kinds = dict.fromkeys((*_BODIES, Refusal, *_structs(ALL_ROUTES)))
    _, schemas = msgspec.json.schema_components(kinds, schema_hook=_of_anything, ref_template=_REF)
    for kind, fields in _BODIES.items():
        _describe(schemas[kind.__name__], fields)
    described_upload(schemas[Upload.__name__])
    return msgspec.json.encode(
        {
            "openapi": "3.1.0",
            "info": {"title": "mmengine", "version": __version__},
            "paths": _paths(ALL_ROUTES),
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


async def serve_document(request: Request) -> ASGIApp:
    return Response(await asyncio.to_thread(document), media_type="application/json")


def _structs(records: Sequence[RouteRecord]) -> Iterator[Body]:
    """Yield every struct in the operations of `records`."""
    for operation in (record.operation for record in records):
        if operation is None:
            continue
        named = (operation.body, operation.answer, operation.refusal, operation.not_ready)
        yield from (kind for kind in named if isinstance(kind, type))
        yield from operation.stream.events if operation.stream is not None else ()


def _paths(records: Sequence[RouteRecord]) -> dict[str, Json]:
    paths: dict[str, Json] = {}
    for record in records:
        if record.operation is not None:
            names = _PATH_PARAMETER.findall(record.path)
            path = _PATH_PARAMETER.sub(r"{\1}", record.path)
            paths.setdefault(path, {})[record.method.lower()] = _operation(record.operation, names)
    return paths


def _operation(operation: Operation, path_names: Sequence[str]) -> Json:
    """Return the OpenAPI operation object. Status 431 has OpenAI's error body on all routes, even on
    Anthropic's.
    """
    responses: Json = {"200": _success(operation)}
    for status in sorted(operation.refusals):
        kind = Refusal if status == 431 else operation.refusal or Refusal
        responses[str(status)] = _answer(STATUSES[status], kind, HEADERS.get(status, ()))
    if operation.not_ready is not None:
        responses["503"] = _answer("Not ready, with the reasons", operation.not_ready, HEADERS[503])
    parameters = [_REQUEST_ID] if operation.creates_answer else []
    parameters += [parameter(name, "path") for name in path_names]
    parameters += [parameter(name, "query") for name in operation.query]
    said: Json = {"summary": operation.summary, "responses": responses}
    if operation.body is not None:
        content = {operation.body_type: {"schema": _ref(operation.body)}}
        said["requestBody"] = {"required": True, "content": content}
    if parameters:
        said["parameters"] = parameters
    if operation.is_public:
        said["security"] = []
    return said


def _success(operation: Operation) -> Json:
    """Return the response object for status 200."""
    if isinstance(operation.answer, str):
        content: Json = {operation.answer: {"schema": {"type": "string"}}}
        return {"description": operation.answer_text, "content": content}
    content = {"application/json": {"schema": _ref(operation.answer)}}
    if operation.stream is not None:
        content["text/event-stream"] = _events(operation.stream)
    found: Json = {"description": operation.answer_text, "content": content}
    if operation.creates_answer:
        found["headers"] = _ANSWER_HEADERS
    return found


_STRING: Json = {"type": "string"}
_ANSWER_HEADERS: Json = {
    "x-request-id": {"schema": _STRING},
    "x-mmengine-ignored-fields": {
        "schema": _STRING,
        "description": "the fields that were left out",
    },
    "x-mmengine-unenforced-tools": {
        "schema": _STRING,
        "description": "tools whose calls may violate the tools' schemas",
    },
}
_REQUEST_ID: Json = {
    "name": "x-request-id",
    "in": "header",
    "required": False,
    "description": "the answer's id is derived from this value, unless the body has a request_id",
    "schema": {"type": "string", "pattern": "^[!-~]{0,128}$"},
}


def _of_anything(kind: type) -> dict[str, object]:
    """Return a schema that allows any value, for a field of type `object`."""
    if kind is object:
        return {"description": "any JSON"}
    raise NotImplementedError


def _describe(schema: dict[str, object], fields: tuple[Field, ...]) -> None:
    """Complete a struct's schema with the `fields` that the struct does not declare. An unsupported field may
    only be null or a value without effect. An optional field may have any value. If `fields` has optional
    fields, the schema also allows unknown fields.
    """
    properties = schema["properties"]
    assert isinstance(properties, dict)
    for field in fields:
        if field.name in properties:
            continue
        if field.how == "ignored":
            properties[field.name] = {"description": field.says}
        elif field.how == "optional":
            properties[field.name] = {"description": f"left out, or refused by a strict server: {field.says}"}
        else:
            only = [value for value in field.neutral if not isinstance(value, list)]
            lists = [{"const": value} for value in field.neutral if isinstance(value, list)]
            properties[field.name] = {
                "description": f"{NOT_DONE} {field.says}",
                "anyOf": [{"enum": [*only, None]}, *lists],
            }
    if not any(field.how == "optional" for field in fields):
        schema["additionalProperties"] = {"type": "null"}


def _answer(description: str, kind: Body, headers: Sequence[str] = ()) -> Json:
    found: Json = {"description": description, "content": {"application/json": {"schema": _ref(kind)}}}
    if headers:
        found["headers"] = {name: {"schema": _STRING} for name in headers}
    return found


def _ref(kind: Body) -> Json:
    return {"$ref": _REF.format(name=kind.__name__)}


def _events(stream: Stream) -> Json:
    """Return the media type object for an event stream. `itemSchema` is a field from OpenAPI 3.2."""
    event: Json
    if stream.done:
        event = {"data": {"anyOf": [{"const": stream.done}, _json_string(*stream.events, Refusal)]}}
    else:
        names = [kind.__struct_config__.tag for kind in stream.events]
        event = {"event": {"enum": names}, "data": _json_string(*stream.events)}
    return {"itemSchema": {"type": "object", "properties": event}}


def _json_string(*kinds: Body) -> Json:
    """Return the schema for a JSON text of any of `kinds`."""
    anything = {"anyOf": [_ref(kind) for kind in kinds]}
    return {"type": "string", "contentMediaType": "application/json", "contentSchema": anything}
