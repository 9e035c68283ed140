"""Parses an answer's text, while it is generated, into plain text and tool calls' names and arguments.

A grammar guarantees the text's syntax, so the parser reads each character only once. JSON arguments are
passed on unchanged. XML arguments are converted to JSON.
"""

import re
from collections.abc import Callable, Iterator
from typing import NamedTuple

from mmengine.structured_output.request.tool_calls import (
    CLOSE,
    OPEN,
    VALUE_END,
    Parameters,
    ToolCalls,
    json_spelling,
    parameters_of,
)

MAX_SPACE = 64  # maximum number of white space characters that are held back before a call
_JSON_HEAD = re.compile(r'\n\{"name": "([^"]*)", "arguments": ')
_XML_HEAD = re.compile(r"\n<function=([^>]*)>\n")
_XML_NEXT = re.compile(r"\n?(?:<parameter=([^>]*)>\n|(</function>))")
_STRUCTURE = re.compile(r'["\\{}\[\]]')
_NO_PARAMETERS = Parameters({}, frozenset(), frozenset(), None, False, None, {})


class CallDelta(NamedTuple):
    """New text for the tool call `number`, from 0.

    The first delta has the `name`; later deltas have arguments.
    """

    number: int
    arguments: str = ""
    name: str = ""


Piece = str | CallDelta


class ToolCallParser:
    """An answer's parser. Call `push` with new text, and `finish` at the answer's end.

    Incomplete markup at the answer's end is dropped. `num_calls`: number of calls that have begun.
    """

    def __init__(self, form: ToolCalls):
        self._form = form
        self._parameters = {
            tool.name: parameters_of(bytes(tool.schema).decode()) if form.format == "xml" else _NO_PARAMETERS
            for tool in form.tools
        }
        self.num_calls = 0
        self._state: Callable[[], Iterator[Piece]] = self._text
        self._held = ""  # text that cannot be parsed without the following text
        self._may_call = True  # with a response format, no call may follow text
        self._space = ""  # white space that is dropped if a call follows
        self._depth, self._in_string, self._escaped = 0, False, False  # state of JSON arguments
        self._tool = _NO_PARAMETERS
        self._names: set[str] = set()  # parameter names that have occurred in the current call
        self._is_raw = self._is_dropped = False  # state of an XML value

    def push(self, text: str) -> list[Piece]:
        """Return the new plain text and tool call pieces, in order."""
        self._held += text
        found: list[Piece] = []
        before = -1
        while self._held and len(self._held) != before:  # a state that consumes nothing needs more text
            before = len(self._held)
            found += self._state()
        return found

    def finish(self) -> str:
        """Return plain text that was held back."""
        rest = self._space + self._held if self._state == self._text and not self.num_calls else ""
        self._held = self._space = ""
        return rest

    def _take(self, size: int) -> str:
        taken, self._held = self._held[:size], self._held[size:]
        return taken

    def _text(self) -> Iterator[Piece]:
        if not self._may_call:
            yield self._take(len(self._held))
            return
        place = self._held.find(OPEN)
        free = place if place >= 0 else len(self._held) - _overlap(self._held, OPEN)
        text = self._space + self._take(free)
        text_part = text[: max(len(text.rstrip()), len(text) - MAX_SPACE)]
        if self._form.has_form and text_part:
            self._may_call, self._space = False, ""
            yield text
            return
        self._space = text[len(text_part) :]
        if text_part and not self.num_calls:
            yield text_part
        if place >= 0:
            self._take(len(OPEN))
            self._space, self._state = "", self._head

    def _head(self) -> Iterator[Piece]:
        """Parse a call's text before the arguments, which includes the tool's name."""
        is_json = self._form.format == "json"
        found = (_JSON_HEAD if is_json else _XML_HEAD).match(self._held)
        if found is None:
            return
        self._take(found.end())
        name = found[1]
        self._tool, self._names = self._parameters.get(name, _NO_PARAMETERS), set()
        self._depth, self._in_string, self._escaped = 0, False, False
        self._state = self._json if is_json else self._xml
        self.num_calls += 1
        yield CallDelta(self.num_calls - 1, name=name)

    def _more(self, arguments: str) -> Iterator[Piece]:
        if arguments:
            yield CallDelta(self.num_calls - 1, arguments)

    def _json(self) -> Iterator[Piece]:
        """Pass on JSON arguments up to their closing bracket."""
        text, at = self._held, 0
        if self._escaped:
            at, self._escaped = 1, False
        while (found := _STRUCTURE.search(text, at)) is not None:
            char, at = found[0], found.end()
            if char == "\\":
                self._escaped = at == len(text)
                at += 1
            elif char == '"':
                self._in_string = not self._in_string
            elif not self._in_string:
                self._depth += 1 if char in "{[" else -1
                if not self._depth:
                    self._state = self._tail
                    yield from self._more(self._take(at))
                    return
        yield from self._more(self._take(len(text)))

    def _tail(self) -> Iterator[Piece]:
        """Skip the text between the arguments and the call's end."""
        place = self._held.find(CLOSE)
        if place < 0:
            self._take(len(self._held) - _overlap(self._held, CLOSE))
            return
        self._take(place + len(CLOSE))
        self._state = self._text
        yield from ()

    def _xml(self) -> Iterator[Piece]:
        """Parse the XML text between parameters."""
        found = _XML_NEXT.match(self._held)
        if found is None:
            return
        self._take(found.end())
        if found[2] is not None:
            self._state = self._tail
            yield from self._more("}" if self._names else "{}")
            return
        name = found[1]
        self._is_dropped = name in self._names  # a JSON object cannot have a second value for this name
        self._is_raw = name in self._tool.raw or (
            name not in self._tool.schemas and self._tool.others_are_raw
        )
        self._state = self._xml_value
        if not self._is_dropped:
            first = "{" if not self._names else ", "
            self._names.add(name)
            yield from self._more(f'{first}"{json_spelling(name)}": ' + ('"' if self._is_raw else ""))

    def _xml_value(self) -> Iterator[Piece]:
        place = self._held.find(VALUE_END)
        ends = place >= 0
        text = self._take(place if ends else len(self._held) - _overlap(self._held, VALUE_END))
        value = json_spelling(text) if self._is_raw else text
        if ends:
            self._take(len(VALUE_END))
            self._state = self._xml
            value += '"' if self._is_raw else ""
        if not self._is_dropped:
            yield from self._more(value)


def _overlap(text: str, marker: str) -> int:
    """Return the length of the longest suffix of `text` that is a proper prefix of `marker`."""
    for size in range(min(len(marker) - 1, len(text)), 0, -1):
        if text.endswith(marker[:size]):
            return size
    return 0
