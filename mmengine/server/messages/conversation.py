"""Converts the turns in a Messages API body to chat messages.

In the Messages API, tool results are blocks in user turns. Each tool result becomes a separate chat message.
Consecutive turns of the same role become one chat message.
"""

import re
from collections.abc import Sequence

from mmengine.errors import FIELD, ErrorCode, FieldPath, shown
from mmengine.server.chat.parsed_request import Json, without_nulls
from mmengine.server.http.errors import ApiError
from mmengine.server.http.field_names import Place
from mmengine.server.http.media_payloads import FILE_ID, MediaPayloads
from mmengine.server.http.unsupported import Unsupported
from mmengine.server.messages.documents import document_text
from mmengine.server.messages.field_table import BLOCKS

MAX_BLOCKS = 4096  # Maximum number of blocks in a turn or a tool result.
_TOOL_BLOCKS = ("text", "image", "document", "search_result")  # Block types in a tool result.
_USER_BLOCKS = (*_TOOL_BLOCKS, "tool_result")  # Block types in a user turn.
_ASSISTANT_BLOCKS = ("text", "thinking", "redacted_thinking", "tool_use")  # Block types in an assistant turn.
# Types of blocks that record calls of tools on Anthropic's server.
_HOSTED_BLOCKS = re.compile(r"server_tool_use|mcp_tool_use|tool_reference|[a-z_]+_tool_result")
_SYSTEM = FieldPath("system")
_ROLES = ("user", "assistant", "system")
_BILLING = "x-anthropic-billing-header:"


class Conversation:
    """The chat messages, and their paths in the client's body. The methods raise ApiError for an invalid
    turn.
    """

    def __init__(self, payloads: MediaPayloads, unsupported: Unsupported):
        self._payloads, self._unsupported = payloads, unsupported
        self.messages: list[Json] = []
        self._places: list[tuple[FieldPath, list[FieldPath]]] = []

    @property
    def places(self) -> tuple[Place, ...]:
        return tuple(Place(where, tuple(parts)) for where, parts in self._places)

    @property
    def continues_answer(self) -> bool:
        """Whether the last turn is the assistant's, so that the answer continues this turn. Raises ApiError
        if this turn calls tools.
        """
        last = self.messages[-1]
        if last["role"] != "assistant":
            return False
        if "tool_calls" in last:
            where = self._places[-1][0]
            raise ApiError(
                ErrorCode.INVALID_VALUE, f"{FIELD} calls tools; send their results as tool_result", where
            )
        return True

    def add_instructions(self, given: str | Sequence[Json]) -> None:
        """Add the system prompt. Claude Code's billing line is removed from the prompt.

        The billing line differs in every call, so no KV block after the line would match the prefix cache.
        """
        if isinstance(given, str):
            text = given.partition("\n")[2] if given.startswith(_BILLING) else given
            if text or not given:
                self._add(_SYSTEM, {"role": "system", "content": text})
            return
        blocks = self._blocks(_SYSTEM, given, ("text",))
        if blocks and str(blocks[0][1].get("text", "")).startswith(_BILLING):
            del blocks[0]
        if blocks or not given:
            self._add_blocks(_SYSTEM, {"role": "system"}, blocks)

    def add_input(self, turns: Sequence[Json]) -> None:
        for number, given in enumerate(turns):
            where, turn = FieldPath("messages", number), without_nulls(given)
            role = turn.get("role")
            if role not in _ROLES:
                text = f"{FIELD} must be user, assistant or system, not {shown(role)}"
                raise ApiError(ErrorCode.INVALID_VALUE, text, where / "role")
            for name in turn:
                if name not in ("role", "content"):
                    self._unsupported.leave_out(_unknown(where, name))
            if role == "assistant":
                self._add_assistant(where, turn.get("content"))
            elif role == "system":
                self._add_system(where, turn.get("content"))
            else:
                self._add_user(where, turn.get("content"))

    def _add_system(self, where: FieldPath, content: object) -> None:
        if isinstance(content, str):
            self._add(where, {"role": "system", "content": content})
        else:
            blocks = self._blocks(where / "content", content, ("text",))
            self._add_blocks(where, {"role": "system"}, blocks)

    def _add_blocks(self, where: FieldPath, message: Json, blocks: list[tuple[FieldPath, Json]]) -> None:
        """Append a message whose content consists of these blocks."""
        self._add(where, {**message, "content": [self._part(*each) for each in blocks]})
        self._places[-1][1].extend(place for place, _ in blocks)

    def _add(self, where: FieldPath, message: Json) -> None:
        self.messages.append(message)
        self._places.append((where, []))

    def _add_user(self, where: FieldPath, content: object) -> None:
        if isinstance(content, str):
            if not self._follows("user"):
                self._add(where, {"role": "user", "content": content})
                return
            content = [{"type": "text", "text": content}]
        for place, block in self._blocks(where / "content", content, _USER_BLOCKS):
            if block["type"] == "tool_result":
                self._result(place, block)
            else:
                if not self._follows("user"):
                    self._add(where, {"role": "user", "content": []})
                self._grow(place, self._part(place, block))

    def _follows(self, role: str) -> bool:
        """Whether the last message has this role."""
        return bool(self.messages) and self.messages[-1]["role"] == role

    def _grow(self, place: FieldPath, part: Json) -> None:
        """Append a content part to the last message."""
        message, (where, parts) = self.messages[-1], self._places[-1]
        content = message["content"]
        if not isinstance(content, list):
            content = [{"type": "text", "text": content}]
            parts.append(where / "content")
        message["content"] = [*content, part]
        parts.append(place)

    def _result(self, where: FieldPath, block: Json) -> None:
        name, content = _text(where, block, "tool_use_id"), block.get("content", "")
        message: Json = {"role": "tool", "tool_call_id": name}
        if isinstance(content, str):
            self._add(where, {**message, "content": content})
            return
        blocks = self._blocks(where / "content", content, _TOOL_BLOCKS)
        self._add_blocks(where, message, blocks)

    def _add_assistant(self, where: FieldPath, content: object) -> None:
        if isinstance(content, str):
            content = [{"type": "text", "text": content}]
        for place, block in self._blocks(where / "content", content, _ASSISTANT_BLOCKS):
            match block["type"]:
                case "text":
                    self._grow_text(where, "content", _text(place, block, "text"), ("tool_calls",))
                case "thinking":
                    text = _text(place, block, "thinking")
                    self._grow_text(where, "reasoning_content", text, ("content", "tool_calls"))
                case "tool_use":
                    self._call(where, place, block)
        if not self._follows("assistant"):
            self._add(where, {"role": "assistant", "content": ""})

    def _grow_text(self, where: FieldPath, field: str, text: str, behind: tuple[str, ...]) -> None:
        """Append text to a field in the assistant's last message. The prompt shows the fields in `behind`
        after this field. If the message already has any of these fields, a new message begins.
        """
        if not self._follows("assistant") or any(name in self.messages[-1] for name in behind):
            self._add(where, {"role": "assistant"})
        message = self.messages[-1]
        message[field] = f"{message.get(field, '')}{text}"

    def _call(self, where: FieldPath, place: FieldPath, block: Json) -> None:
        name, call, given = _text(place, block, "name"), _text(place, block, "id"), block.get("input", {})
        if not isinstance(given, dict):
            raise ApiError(
                ErrorCode.INVALID_VALUE, f"{FIELD} must be an object, not {shown(given)}", place / "input"
            )
        if not self._follows("assistant"):
            self._add(where, {"role": "assistant"})
        calls = self.messages[-1].setdefault("tool_calls", [])
        assert isinstance(calls, list)
        calls.append({"id": call, "type": "function", "function": {"name": name, "arguments": given}})

    def _part(self, where: FieldPath, block: Json) -> Json:
        if block["type"] == "text":
            return {"type": "text", "text": _text(where, block, "text")}
        if block["type"] in ("document", "search_result"):
            return {"type": "text", "text": document_text(where, block, self._unsupported)}
        options: Json = {name: block[name] for name in ("min_pixels", "max_pixels") if name in block}
        return {"type": "image_url", "image_url": {"url": self._source(where / "source", block)}, **options}

    def _source(self, where: FieldPath, block: Json) -> str | bytes:
        """Return an image's bytes, or the URL for the chat message. Raises ApiError."""
        given = block.get("source")
        source = without_nulls(given) if isinstance(given, dict) else {}
        match source.get("type"):
            case "base64":
                kind, data = _text(where, source, "media_type"), _text(where, source, "data")
                if not kind.startswith("image/"):
                    text = f"{FIELD} must be an image type, not {shown(kind)}"
                    raise ApiError(ErrorCode.UNSUPPORTED_CONTENT, text, where / "media_type")
                # Invalid base64 may contain % or #, which a URL parser would interpret.
                bare = data.replace("%", "%25").replace("#", "%23")
                return self._payloads.of(data) or f"data:{kind};base64,{bare}"
            case "url":
                return _text(where, source, "url")
            case "file":
                name = _text(where, source, "file_id")
                if FILE_ID.fullmatch(name):
                    return name
                raise ApiError(
                    ErrorCode.INVALID_VALUE, f"{FIELD} must name an uploaded image", where / "file_id"
                )
        text = f"{FIELD} must be base64, url or file, not {shown(source.get('type'))}"
        raise ApiError(ErrorCode.UNSUPPORTED_CONTENT, text, where / "type")

    def _blocks(
        self, where: FieldPath, given: object, kinds: tuple[str, ...]
    ) -> list[tuple[FieldPath, Json]]:
        """Return the blocks with their paths. `kinds`: the allowed block types. A lenient server ignores
        blocks that record tool calls on Anthropic's server. Raises ApiError.
        """
        if not isinstance(given, list):
            text = f"{FIELD} must be a text or a list of blocks, not {shown(given)}"
            raise ApiError(ErrorCode.INVALID_VALUE, text, where)
        if len(given) > MAX_BLOCKS:
            text = f"{FIELD} has {len(given)} blocks; the limit is {MAX_BLOCKS}"
            raise ApiError(ErrorCode.INVALID_VALUE, text, where)
        found = []
        for number, one in enumerate(given):
            place = where / number
            kind = one.get("type") if isinstance(one, dict) else None
            if not isinstance(kind, str) or kind not in kinds:
                text = f"{FIELD} has the unsupported type {shown(kind)}; use {', '.join(kinds)}"
                refused = ApiError(ErrorCode.UNSUPPORTED_CONTENT, text, place / "type")
                if not isinstance(kind, str) or not _HOSTED_BLOCKS.fullmatch(kind):
                    raise refused
                self._unsupported.leave_out(refused, kind)
                continue
            block = without_nulls(one)
            check_fields(place, block, kind, self._unsupported)
            found.append((place, block))
        return found

    def finished(self) -> list[Json]:
        """Return the messages. A message without content gets an empty content."""
        return [message if "content" in message else {**message, "content": ""} for message in self.messages]


def check_fields(where: FieldPath, given: Json, kind: str, unsupported: Unsupported) -> None:
    """Ignore the unknown fields in a block or tool, or raise ApiError if the server is strict. `kind`: a
    block type, or "custom" for a tool.
    """
    taken, ignored = BLOCKS[kind]
    for name in given:
        if name != "type" and name not in taken and name not in ignored:
            unsupported.leave_out(_unknown(where, name))


def _unknown(where: FieldPath, name: str) -> ApiError:
    place = where / name[:64]
    return ApiError(ErrorCode.UNKNOWN_FIELD, f"{FIELD} is unknown; leave it out", place)


def _text(where: FieldPath, block: Json, name: str) -> str:
    """Return a block's field `name`. Raises ApiError if the field is not a string."""
    value = block.get(name)
    if not isinstance(value, str):
        raise ApiError(ErrorCode.INVALID_VALUE, f"{FIELD} must be a string, not {shown(value)}", where / name)
    return value
