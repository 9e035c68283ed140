"""What the server takes, as an OpenAPI document, made of the same structs and tables that read it."""

import msgspec

from mmengine.server.asked import Json
from mmengine.server.chat_request import ChatBody
from mmengine.server.completion_request import CompletionBody
from mmengine.server.errors import ErrorBody
from mmengine.server.fields import CHAT, COMPLETION, Field
from mmengine.version import __version__

_REF = "#/components/schemas/{name}"
_ERRORS = ("400", "401", "404", "408", "413", "429", "500", "503", "504")
_OTHERS = {
    "/v1/models": ("get", "The served names"),
    "/v1/models/{name}": ("get", "One of them"),
    "/tokenize": ("post", "Tokens of a prompt, or of messages without media"),
    "/detokenize": ("post", "The text of tokens"),
    "/health": ("get", "Ready, or why not"),
    "/health/ready": ("get", "Ready, or why not"),
    "/health/live": ("get", "The event loop answers"),
    "/metrics": ("get", "Prometheus' text format"),
    "/version": ("get", "The version"),
}


def document() -> bytes:
    """As JSON."""
    kinds = (ChatBody, CompletionBody, ErrorBody)
    _, schemas = msgspec.json.schema_components(kinds, schema_hook=_of_anything, ref_template=_REF)
    for name, fields in (("ChatBody", CHAT), ("CompletionBody", COMPLETION)):
        _describe(schemas[name], fields)
    paths: Json = {
        "/v1/chat/completions": {"post": _answering("Answer a conversation", "ChatBody")},
        "/v1/completions": {"post": _answering("Go on with texts", "CompletionBody")},
    }
    for path, (method, summary) in _OTHERS.items():
        found: Json = {"summary": summary, "responses": {"200": {"description": "As asked"}, **_errors()}}
        if "{name}" in path:
            found["parameters"] = [
                {"name": "name", "in": "path", "required": True, "schema": {"type": "string"}}
            ]
        paths[path] = {method: found}
    return msgspec.json.encode(
        {
            "openapi": "3.1.0",
            "info": {"title": "mmengine", "version": __version__},
            "paths": paths,
            "components": {
                "schemas": schemas,
                "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
            },
            "security": [{"key": []}, {}],
        }
    )


def _of_anything(kind: type) -> dict[str, object]:
    """The schema of `object`, which any value is."""
    if kind is object:
        return {"description": "any JSON"}
    raise NotImplementedError


def _describe(schema: dict[str, object], fields: tuple[Field, ...]) -> None:
    """Say of each field what its table says; no other is taken."""
    properties = schema["properties"]
    assert isinstance(properties, dict)
    for field in fields:
        if field.name in properties:
            properties[field.name]["description"] = field.says
        elif field.how == "ignored":
            properties[field.name] = {"description": field.says}
    schema["additionalProperties"] = False


def _answering(summary: str, body: str) -> Json:
    return {
        "summary": summary,
        "requestBody": {
            "required": True,
            "content": {"application/json": {"schema": {"$ref": _REF.format(name=body)}}},
        },
        "responses": {
            "200": {
                "description": "The answer, or with stream true its events",
                "content": {
                    "application/json": {"schema": {"type": "object"}},
                    "text/event-stream": {"schema": {"type": "string"}},
                },
            },
            **_errors(),
        },
    }


def _errors() -> Json:
    schema = {
        "type": "object",
        "properties": {"error": {"$ref": _REF.format(name="ErrorBody")}},
        "required": ["error"],
    }
    content = {"application/json": {"schema": schema}}
    return {status: {"description": "An error", "content": content} for status in _ERRORS}
