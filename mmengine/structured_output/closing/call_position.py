"""Tracks the position in a text with tool calls, and finds the strings that may end the current parameter,
call or reasoning.
"""

from collections.abc import Sequence
from typing import NamedTuple

from mmengine.structured_output.closing.json_position import MAX_KNOWN, Position
from mmengine.structured_output.request.tool_calls import OPEN, VALUE_END, ToolCalls, head_of

_OPEN = OPEN.encode()
_VALUE = b">\n"  # In the xml syntax, a parameter's value follows these bytes.
_TAIL = 16  # Number of bytes in `Position.tail`, the text's last bytes.
MAX_HEADS = 16  # Maximum number of tools with a precomputed shortest call.
_XML_ENDS = VALUE_END.encode() + b"\n", b"</function>"


class CallSyntax(NamedTuple):
    """The syntax for tool calls in a grammar's texts.

    `has_answer`: whether an answer without calls is JSON. `is_xml`: whether calls have the xml syntax.
    `think_end`: the string that ends the reasoning; empty if there is no reasoning. `heads`: for each tool,
    the text with which a call begins.
    """

    has_answer: bool
    is_xml: bool
    think_end: Sequence[bytes]
    heads: Sequence[bytes]

    @classmethod
    def of(cls, calls: ToolCalls) -> "CallSyntax":
        thinks = (calls.reasoning[1].encode(),) if calls.reasoning is not None else ()
        heads = [_OPEN + head_of(tool.name, calls.format).encode() for tool in calls.tools[:MAX_HEADS]]
        return cls(calls.has_form, calls.format == "xml", thinks, heads)

    def advance(self, place: Position, text: bytes) -> Position:
        """Return the position after `text`, which begins at `place`."""
        for at in range(len(text)):
            place = self._step(place, text[at : at + 1])
        return place

    def _step(self, place: Position, byte: bytes) -> Position:
        tail = (place.tail + byte)[-_TAIL:]
        if tail.endswith(_OPEN):
            return Position(call=b"", tail=tail)
        if place.call is None:
            return (place.advance(byte) if self.has_answer else Position())._replace(tail=tail)
        call = place.call + byte if len(place.call) < MAX_KNOWN else place.call
        if self.is_xml and tail.endswith(_VALUE):
            return Position(call=call, tail=tail)
        return place.advance(byte)._replace(call=call, tail=tail)

    def is_free(self, place: Position) -> bool:
        """Return whether `place` is in free text outside calls. Such a text may end at any position."""
        return place.call is None and not self.has_answer

    def ends(self, place: Position) -> Sequence[bytes]:
        """Return the strings that may end the current parameter, call or reasoning."""
        if place.call is not None and self.is_xml:
            # Whether a parameter or the call's beginning has just ended.
            between = place.tail.endswith(_XML_ENDS[0][1:]) or place.call.count(b"\n") == 2
            return _XML_ENDS if between and place.tail.endswith(b"\n") else _XML_ENDS[:1]
        if place.call is not None:
            return ()
        return self.think_end if place.string is None and not place.inside else ()

    def value_ends(self, place: Position) -> Sequence[bytes]:
        """Return the strings that may follow a parameter's value."""
        return _XML_ENDS[:1] if self.is_xml and place.call is not None else ()
