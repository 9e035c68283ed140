"""The content of a message as a template reads it: one text or a list of parts, and where it is cut."""

from collections.abc import Mapping
from typing import Any

from mmengine.errors import InvalidRequest

CUT = "\ud800"  # where continue_final_message ends the text: a high surrogate, no mark of a special token


def is_text_in_parts(message: Mapping[str, object]) -> bool:
    """A list of parts, all of them text."""
    content = message.get("content")
    return isinstance(content, list) and all("text" in part for part in content)


def joined(message: dict) -> dict:
    """A message of such parts with one text."""
    return {**message, "content": "\n".join(part["text"] for part in message["content"])}


def in_parts(message: dict) -> dict:
    """A message of one text with a list of parts; others are as they are."""
    content = message.get("content")
    if not isinstance(content, str):
        return message
    return {**message, "content": [{"type": "text", "text": content}]}


def with_cut(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The messages with a cut, and a space to see whether the template trims, behind the last text. Raises
    InvalidRequest."""
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
    """What stands before the cut. Raises InvalidRequest where the template left it out."""
    end = rendered.rfind(CUT)
    if end < 0:
        raise InvalidRequest("the model's chat template drops the last message, so it cannot be continued")
    kept = rendered[:end]
    return kept if rendered[end + 1 : end + 2] == " " else kept.rstrip()
