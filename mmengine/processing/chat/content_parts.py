"""Converts a message's content to the chat template's format: a string, or a list of parts.

For `continue_final_message`, also cuts the rendered prompt after the final message's text.
"""

from collections.abc import Mapping
from typing import Any

from mmengine.errors import InvalidRequest
from mmengine.processing.chat.marks import CUT


def is_text_in_parts(message: Mapping[str, object]) -> bool:
    """Return whether the content is a list of text parts only."""
    content = message.get("content")
    return isinstance(content, list) and all("text" in part for part in content)


def joined(message: dict) -> dict:
    """Return the message with its text parts joined by line feeds."""
    return {**message, "content": "\n".join(part["text"] for part in message["content"])}


def in_parts(message: dict) -> dict:
    """Return the message with its text as a list of parts. Messages without text are returned unchanged."""
    content = message.get("content")
    if not isinstance(content, str):
        return message
    return {**message, "content": [{"type": "text", "text": content}]}


def with_cut(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the messages, with the mark CUT and then a space appended to the last text.

    A rendered prompt without this space shows that the template strips texts. Raises InvalidRequest if the
    last message has no text.
    """
    content = messages[-1].get("content")
    if isinstance(content, str):
        continued: Any = content + CUT + " "
    else:
        continued = list(content or ())
        for i in reversed(range(len(continued))):
            if "text" in continued[i]:
                continued[i] = {**continued[i], "text": continued[i]["text"] + CUT + " "}
                break
        else:
            raise InvalidRequest(
                "continue_final_message is set, but the last message holds no text to continue"
            )
    return [*messages[:-1], {**messages[-1], "content": continued}]


def cut(rendered: str) -> str:
    """Return the prompt up to the cut mark. Raises InvalidRequest if the template dropped the mark."""
    end = rendered.rfind(CUT)
    if end < 0:
        raise InvalidRequest("the model's chat template drops the last message, so it cannot be continued")
    kept = rendered[:end]
    return kept if rendered[end + 1 : end + 2] == " " else kept.rstrip()
