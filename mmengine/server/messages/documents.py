"""Converts documents and search results to the text that the model reads. Only documents that consist of text
are supported.
"""

from mmengine.errors import FIELD, ErrorCode, FieldPath, shown
from mmengine.server.chat.parsed_request import Json, without_nulls
from mmengine.server.http.errors import ApiError
from mmengine.server.http.unsupported import Unsupported


def document_text(where: FieldPath, block: Json, unsupported: Unsupported) -> str:
    """Return a text that contains a block's title, its context or source, and its content. Raises ApiError
    for a document that is not a text.
    """
    citations = block.get("citations")
    if isinstance(citations, dict) and citations.get("enabled"):
        text = f"{FIELD} are not supported; set enabled to false"
        unsupported.leave_out(ApiError(ErrorCode.UNSUPPORTED_FIELD, text, where / "citations"))
    is_result = block["type"] == "search_result"
    names = ("title", "source" if is_result else "context")
    heads = [_text(where, block, name) for name in names if name in block]
    if is_result:
        return "\n".join([*heads, _content(where / "content", block.get("content"))])
    return "\n".join([*heads, _source(where / "source", block.get("source"))])


def _text(where: FieldPath, block: Json, name: str) -> str:
    value = block.get(name)
    if not isinstance(value, str):
        raise ApiError(ErrorCode.INVALID_VALUE, f"{FIELD} must be a string, not {shown(value)}", where / name)
    return value


def _source(where: FieldPath, given: object) -> str:
    source = without_nulls(given) if isinstance(given, dict) else {}
    match source.get("type"):
        case "text":
            return _text(where, source, "data")
        case "content":
            return _content(where / "content", source.get("content"))
    text = f"{FIELD} must be text or content, not {shown(source.get('type'))}; send the text of the file"
    raise ApiError(ErrorCode.UNSUPPORTED_CONTENT, text, where / "type")


def _content(where: FieldPath, given: object) -> str:
    if isinstance(given, str):
        return given
    texts = []
    for number, block in enumerate(given if isinstance(given, list) else [given]):
        text = block.get("text") if isinstance(block, dict) else None
        if not isinstance(text, str):
            raise ApiError(ErrorCode.UNSUPPORTED_CONTENT, f"{FIELD} must be a block of text", where / number)
        texts.append(text)
    return "\n".join(texts)
