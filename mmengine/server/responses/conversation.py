"""Converts the input items of a Responses body to chat messages and to the response object's items.

Consecutive assistant items (reasoning, text, tool calls) become a single chat message.
"""

import re
from collections.abc import Callable, Sequence

import msgspec

from mmengine.errors import FIELD, ErrorCode, FieldPath, shown
from mmengine.server.chat.parsed_request import Json, without_nulls
from mmengine.server.http.errors import ApiError
from mmengine.server.http.field_names import Place
from mmengine.server.http.media_payloads import MediaPayloads
from mmengine.server.http.unsupported import Unsupported
from mmengine.server.responses.content_parts import Parts, text_of
from mmengine.structured_output.request.tool_calls import INPUT

MAX_ARGUMENT_CHARS = 2**20  # Maximum number of characters in the arguments of a tool call in the input.
_ROLES = ("user", "system", "developer", "assistant")
_TAKEN = (
    "message, reasoning, function_call, function_call_output, custom_tool_call or custom_tool_call_output"
)
# Item types for calls of OpenAI's and Codex's own tools, and for Codex's snapshots of the working tree.
_HOSTED = (
    *("web_search", "file_search", "code_interpreter", "image_generation", "computer", "mcp", "tool_search"),
    *("local_shell", "shell", "apply_patch"),
)
_HOSTED_ITEMS = re.compile(
    rf"({'|'.join(_HOSTED)})_call(_output)?"
    "|tool_search_output|mcp_list_tools|mcp_approval_(request|response)|ghost_snapshot"
)
_decode_object = msgspec.json.Decoder(dict[str, object]).decode


class Conversation:
    """The chat messages from the input items, and each message's path in the body.

    `items`: the response object's input items. `media`: a dict from SHA-256 digests in hex to media that were
    sent as data: URLs. The methods raise ApiError for an invalid item.
    """

    def __init__(
        self,
        request_id: str,
        payloads: MediaPayloads,
        stored_media: Callable[[str], bytes | None],
        unsupported: Unsupported,
    ):
        self._request_id, self._unsupported = request_id, unsupported
        self._parts = Parts(payloads, stored_media)
        self.messages: list[Json] = []
        self.places: list[Place] = []
        self.items: list[Json] = []
        self._known: set[str] = set()  # Ids of the items in the previous responses.
        # Whether the last message is the assistant's, and may get further items.
        self._is_assistant = False

    @property
    def media(self) -> dict[str, bytes]:
        return self._parts.media

    def add_instructions(self, text: str) -> None:
        self._add(FieldPath("instructions"), {"role": "system", "content": text})

    def add_previous(self, items: Sequence[Json]) -> None:
        """Add the previous responses' items."""
        self._parts.reads_stored_media = True
        for number, item in enumerate(items):
            self._item(FieldPath("previous_response_id", number), item)
            if isinstance(name := item.get("id"), str):
                self._known.add(name)
        self._parts.reads_stored_media = False

    def add_input(self, given: str | Sequence[Json]) -> None:
        """Add this call's input."""
        if isinstance(given, str):
            given = [{"role": "user", "content": given}]
            is_text = True
        else:
            is_text = False
        for number, item in enumerate(given):
            read, where = without_nulls(item), FieldPath("input")
            if (repeated := self._item(where if is_text else where / number, read)) is not None:
                prefix, repeated_item = repeated
                name = read.get("id")
                if not isinstance(name, str) or not name:
                    name = f"{prefix}_{self._request_id}_in{number}"
                self.items.append({"id": name, **repeated_item})

    def _add(self, place: FieldPath, message: Json, parts: tuple[FieldPath, ...] = ()) -> None:
        """Append a message. `parts`: the paths of the content parts, if the item's field is not named
        `content`.
        """
        self.messages.append(message)
        self.places.append(Place(place, parts))
        self._is_assistant = False

    def _item(self, where: FieldPath, item: Json) -> tuple[str, Json] | None:
        """Add an item, and return a prefix for its id and the response object's item without an id. Returns
        None for a reference to a previous response's item, and for a hosted tool's item on a lenient server.
        """
        kind = item.get("type", "message" if "role" in item else "item_reference" if "id" in item else None)
        match kind:
            case "message":
                return "msg", self._message(where, item)
            case "function_call":
                return "fc", self._call(where, item)
            case "custom_tool_call":
                return "ctc", self._custom_call(where, item)
            case "function_call_output":
                return "fco", self._output(where, item)
            case "custom_tool_call_output":
                return "ctco", self._output(where, item)
            case "reasoning":
                return "rs", self._reasoning(where, item)
            case "item_reference" if isinstance(name := item.get("id"), str) and name in self._known:
                return None
            case "item_reference":
                text = f"{where} refers to {shown(item.get('id'))}, which the previous response does not have"
                raise ApiError(ErrorCode.UNSUPPORTED_FIELD, f"{text}; send the item itself", where)
        text = f"{FIELD} has the unsupported type {shown(kind)}; use {_TAKEN}"
        refused = ApiError(ErrorCode.UNSUPPORTED_FIELD, text, where / "type")
        if not isinstance(kind, str) or not _HOSTED_ITEMS.fullmatch(kind):
            raise refused
        self._unsupported.leave_out(refused, kind)
        return None

    def _message(self, where: FieldPath, item: Json) -> Json:
        role = item.get("role")
        if role not in _ROLES:
            text = f"{FIELD} must be user, system, developer or assistant, not {shown(role)}"
            raise ApiError(ErrorCode.INVALID_VALUE, text, where / "role")
        if role == "assistant":
            text, repeated = self._parts.assistant_text(where / "content", item.get("content"))
            self._growing(where, ("content", "tool_calls"))["content"] = text
        else:
            content, repeated = self._parts.read(where / "content", item.get("content"))
            self._add(where, {"role": "system" if role == "developer" else role, "content": content})
        return {"type": "message", "status": _status(item), "role": role, "content": repeated}

    def _growing(self, where: FieldPath, closed_by: tuple[str, ...]) -> Json:
        """Return the assistant message for an item. Adds a new message if the last message is not the
        assistant's, or if the last message has a field in `closed_by`.
        """
        if not self._is_assistant or any(name in self.messages[-1] for name in closed_by):
            self._add(where, {"role": "assistant"})
            self._is_assistant = True
        return self.messages[-1]

    def _call(self, where: FieldPath, item: Json) -> Json:
        name, call, arguments = (text_of(where, item, each) for each in ("name", "call_id", "arguments"))
        if len(arguments) > MAX_ARGUMENT_CHARS:
            text = f"{FIELD} has more than {MAX_ARGUMENT_CHARS} characters: shorten the arguments"
            raise ApiError(ErrorCode.INVALID_VALUE, text, where / "arguments")
        try:
            meant = _decode_object(arguments) if arguments else {}
        except (msgspec.MsgspecError, UnicodeError, RecursionError):
            text = (
                f"{FIELD} is not a JSON object; send the arguments unchanged, and leave out incomplete calls"
            )
            raise ApiError(ErrorCode.INVALID_VALUE, text, where / "arguments") from None
        self._add_call(where, call, name, meant)
        repeated: Json = {"type": "function_call", "status": _status(item), "call_id": call}
        return {**repeated, "name": name, "arguments": arguments}

    def _custom_call(self, where: FieldPath, item: Json) -> Json:
        name, call, given = (text_of(where, item, each) for each in ("name", "call_id", "input"))
        self._add_call(where, call, name, {INPUT: given})
        repeated: Json = {"type": "custom_tool_call", "status": _status(item), "call_id": call}
        return {**repeated, "name": name, "input": given}

    def _add_call(self, where: FieldPath, call: str, name: str, arguments: Json) -> None:
        calls = self._growing(where, ()).setdefault("tool_calls", [])
        assert isinstance(calls, list)
        calls.append({"id": call, "type": "function", "function": {"name": name, "arguments": arguments}})

    def _output(self, where: FieldPath, item: Json) -> Json:
        call = text_of(where, item, "call_id")
        content, repeated = self._parts.read(where / "output", item.get("output"))
        parts = () if isinstance(content, str) else tuple(where / "output" / n for n in range(len(content)))
        self._add(where, {"role": "tool", "tool_call_id": call, "content": content}, parts)
        output = item["output"] if isinstance(content, str) else repeated
        return {"type": item["type"], "status": _status(item), "call_id": call, "output": output}

    def _reasoning(self, where: FieldPath, item: Json) -> Json:
        content = self._parts.reasoning(where / "content", item.get("content"), "reasoning_text")
        summary = self._parts.reasoning(where / "summary", item.get("summary"), "summary_text")
        repeated: Json = {
            "type": "reasoning",
            "status": _status(item),
            "summary": summary,
            "content": content,
        }
        texts = [part["text"] for part in content or summary]
        if not texts:
            if "encrypted_content" in item:
                text = f"{FIELD} cannot be decrypted here; leave it out, or send content instead"
                place = where / "encrypted_content"
                self._unsupported.leave_out(ApiError(ErrorCode.UNSUPPORTED_FIELD, text, place))
            return repeated
        message = self._growing(where, ("content", "tool_calls", "reasoning_content"))
        message["reasoning_content"] = "\n".join(texts)
        return repeated

    def finished(self) -> list[Json]:
        """Return the messages. A message without content gets an empty content."""
        return [message if "content" in message else {**message, "content": ""} for message in self.messages]


def _status(item: Json) -> str:
    return "incomplete" if item.get("status") == "incomplete" else "completed"
