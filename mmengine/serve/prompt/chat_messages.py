"""Converts messages with tool calls from OpenAI's format to the format that chat templates expect."""

import json
from collections.abc import Mapping, Sequence

from mmengine.errors import FIELD, FieldPath, InvalidRequest, shown
from mmengine.structured_output.request.fields import check_mapping

MAX_ARGUMENT_CHARS = 2**20  # maximum length of a single call's arguments
_FUNCTION = "function"
Json = dict[str, object]


def for_template(messages: Sequence[Json]) -> Sequence[Json]:
    """Return the messages after parsing each tool call's arguments from JSON text, as templates expect.

    A message with calls and no content gets the content "". A tool result that is a list of text parts
    becomes a single text. Raises InvalidRequest with the invalid field's path. The processor makes all other
    checks.
    """
    if not any(isinstance(each, (dict, Mapping)) and _is_of_tools(each) for each in messages):
        return messages
    return [_message(FieldPath("messages", n), each) for n, each in enumerate(messages)]


def _is_of_tools(message: Json) -> bool:
    return message.get("role") == "tool" or message.get("tool_calls") is not None


def _message(where: FieldPath, message: Json) -> Json:
    if not isinstance(message, Mapping):
        return message
    role = message.get("role")
    if role == "tool":
        return _result(where, message)
    calls = message.get("tool_calls")
    if calls is None:
        return message
    if role != "assistant":
        raise InvalidRequest(
            f"{FIELD} is not allowed in a message with the role {shown(role)}", path=where / "tool_calls"
        )
    if not isinstance(calls, (list, tuple)):
        raise InvalidRequest(f"{FIELD} must be a list, not {shown(calls)}", path=where / "tool_calls")
    content = message.get("content")
    read = {**message, "content": "" if content is None else content}
    read.pop("tool_calls")
    if calls:
        read["tool_calls"] = [_call(where / "tool_calls" / n, each) for n, each in enumerate(calls)]
    return read


def _call(where: FieldPath, given: object) -> Json:
    call = check_mapping(where, given)
    function = check_mapping(where / _FUNCTION, call.get(_FUNCTION))
    if not isinstance(function.get("name"), str):
        raise InvalidRequest(f"{FIELD} must be a string", path=where / _FUNCTION / "name")
    arguments = _arguments(where / _FUNCTION / "arguments", function.get("arguments"))
    return {**call, _FUNCTION: {**function, "arguments": arguments}}


def _arguments(where: FieldPath, given: object) -> dict[str, object]:
    if given is None or given == "":
        return {}
    if isinstance(given, str):
        if len(given) > MAX_ARGUMENT_CHARS:
            raise InvalidRequest(f"{FIELD} has more than {MAX_ARGUMENT_CHARS} characters", path=where)
        try:
            given = json.loads(given)
        except (ValueError, RecursionError):
            raise InvalidRequest(
                f"{FIELD} is not JSON; send the arguments unchanged, and leave out incomplete calls",
                path=where,
            ) from None
    if not isinstance(given, Mapping):
        raise InvalidRequest(
            f"{FIELD} must be an object, or an object as JSON text, not {shown(given)}", path=where
        )
    return dict(given)


def _result(where: FieldPath, message: Json) -> Json:
    name = message.get("tool_call_id")
    if name is not None and not isinstance(name, str):
        raise InvalidRequest(f"{FIELD} must be a string, not {shown(name)}", path=where / "tool_call_id")
    content = message.get("content")
    if content is None:
        return {**message, "content": ""}
    if not isinstance(content, (list, tuple)):
        return message
    texts = [part.get("text") if isinstance(part, Mapping) else None for part in content]
    found = [text for text in texts if isinstance(text, str)]
    return {**message, "content": "".join(found)} if len(found) == len(texts) else message
