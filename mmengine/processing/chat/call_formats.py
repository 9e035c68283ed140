"""Detects a chat template's tool call format: renders a chat with a tool call, and searches the prompt for
the call.
"""

from collections.abc import Callable

from mmengine.errors import InvalidRequest
from mmengine.request import CallFormat

Json = dict[str, object]
_NAME, _ARGUMENT, _VALUE = "probe_tool", "probe_argument", "probe value"
_TOOL: Json = {
    "type": "function",
    "function": {
        "name": _NAME,
        "description": "A tool.",
        "parameters": {
            "type": "object",
            "properties": {_ARGUMENT: {"type": "string", "description": "An argument."}},
            "required": [_ARGUMENT],
        },
    },
}
_CALL: Json = {
    "id": "call_0",
    "type": "function",
    "function": {"name": _NAME, "arguments": {_ARGUMENT: _VALUE}},
}
_WRITTEN: dict[CallFormat, str] = {
    "json": f'<tool_call>\n{{"name": "{_NAME}", "arguments": {{"{_ARGUMENT}": "{_VALUE}"}}}}\n</tool_call>',
    "xml": (
        f"<tool_call>\n<function={_NAME}>\n<parameter={_ARGUMENT}>\n{_VALUE}\n</parameter>\n</function>\n"
        "</tool_call>"
    ),
}
_USER: Json = {"role": "user", "content": "a"}
_ASSISTANT: Json = {"role": "assistant", "content": "", "tool_calls": [_CALL]}
_RESULT: Json = {"role": "tool", "tool_call_id": "call_0", "content": "b"}


def call_format_of(
    render: Callable[[list[Json], list[Json] | None], str],
) -> CallFormat | None:
    """Return the template's tool call format, "json" or "xml", or None.

    `render`: returns the prompt for messages and tools. Returns None if the prompt lacks the tools, or if the
    call has another format.
    """
    try:
        if _NAME not in render([_USER], [_TOOL]):
            return None
        prompt = render([_USER, _ASSISTANT, _RESULT], [_TOOL])
    except InvalidRequest:
        return None
    return next((form for form, text in _WRITTEN.items() if text in prompt), None)
