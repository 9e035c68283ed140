"""Writes tool calls as grammars for llguidance.

The text around values becomes a Lark grammar. In the json syntax, each tool's arguments become a JSON Schema
or Lark grammar. In the xml syntax, a parameter that is a raw string becomes a terminal, and the value of
every other parameter becomes a JSON Schema or Lark grammar.

Free text is a lazy lexeme, so the text ends where the first call begins.
"""

import json
import re

from mmengine.structured_output.engines.llguidance.lark_text import quoted
from mmengine.structured_output.engines.llguidance.tag_grammar import schema_named
from mmengine.structured_output.request.tool_calls import (
    CLOSE,
    INPUT,
    OPEN,
    VALUE_END,
    Json,
    Parameters,
    ToolCalls,
    head_of,
    parameters_of,
)

_SPACE = r"SPACE: /\n{1,2}/"  # White space in chat templates between reasoning and a call.
_OTHER_NAME = r"OTHER_NAME: /[A-Za-z_][A-Za-z0-9_.\-]{0,63}/"
_NOT_ENDED = r"~/(?s:.*)\n<\/parameter>(?s:.*)/"
# Call syntax -> the text before and after a custom tool's input.
_AROUND_INPUT = {
    "json": (f'{{"{INPUT}": ', "}"),
    "xml": (f"<parameter={INPUT}>\n", VALUE_END + "\n"),
}
_REGEX_PIECE = re.compile(r"\\.|/", re.DOTALL)


def call_grammars(form: ToolCalls, max_digits: int = 0) -> str:
    """Return the grammars as JSON. `max_digits`: the digit limit for JSON numbers, as in `schema_named`; 0:
    no limit.
    """
    writer = _Writer(max_digits)
    lines = ["TEXT: /(?s:.*)/", _SPACE, _OTHER_NAME, *_start(form, writer)]
    for number, tool in enumerate(form.tools):
        schema, head = bytes(tool.schema).decode(), quoted(head_of(tool.name, form.format))
        tail = quoted(("}\n" if form.format == "json" else "</function>\n") + CLOSE)
        if tool.lark:
            before, after = _AROUND_INPUT[form.format]
            value = f"{quoted(before)} {writer.text(tool.lark)} {quoted(after)}"
            lines.append(f"tool_{number}: {head} {value} {tail}")
        elif form.format == "json":
            lines.append(f"tool_{number}: {head} {writer.value(schema)} {tail}")
        else:
            named = writer.parameters(f"{number}", parameters_of(schema))
            lines.append(f"tool_{number}: {head} {named} {tail}")
    lines.append("body: " + " | ".join(f"tool_{number}" for number in range(len(form.tools))))
    grammars = [{"name": "calls", "lark_grammar": "\n".join([*lines, *writer.lines])}, *writer.grammars]
    return json.dumps({"grammars": grammars}, ensure_ascii=False)


def _start(form: ToolCalls, writer: "_Writer") -> list[str]:
    several = form.parallel and form.choice != "named"
    lines = ["more: " + (f"({quoted(chr(10) + OPEN)} body)*" if several else '""')]
    forced = f"SPACE? {quoted(OPEN)} body more"
    if form.choice != "auto":
        return [f"start: {forced}", *lines]
    think = ""
    if form.reasoning is not None:
        begin, end = form.reasoning
        think = "think? "
        lines.append(f"think[lazy]: {quoted(begin)} TEXT {quoted(end)}")
    if form.has_form:
        answer = writer.value(bytes(form.answer).decode())
        return [f"start: {think}(SPACE? {answer} | {forced})", *lines]
    free = f" & ~/{re.escape(form.reasoning[0])}(?s:.*)/" if form.reasoning is not None else ""
    lines += [f"FREE: TEXT{free}", f"opened[lazy]: FREE {quoted(OPEN)}", "REST: TEXT"]
    return [f"start: {think}(REST | opened body more)", *lines]


class _Writer:
    """Collects the grammars for values and the rules for parameters."""

    def __init__(self, max_digits: int) -> None:
        self._max_digits = max_digits
        self.lines: list[str] = []
        self.grammars: list[dict[str, object]] = []

    def value(self, schema: str) -> str:
        """Return the expression for a value that matches a normalized schema."""
        name = f"json_{len(self.grammars)}"
        self.grammars.append(schema_named(name, schema, self._max_digits))
        return f"@{name}"

    def text(self, lark: str) -> str:
        """Return the expression for a text that matches a Lark grammar."""
        name = f"lark_{len(self.grammars)}"
        self.grammars.append({"name": name, "lark_grammar": lark})
        return f"@{name}"

    def parameters(self, prefix: str, found: Parameters) -> str:
        """Return the expression for a tool's parameters, in schema order."""
        parts = []
        for place, (name, schema) in enumerate(found.schemas.items()):
            body = self._written(f"{prefix}_{place}", schema, name in found.raw, found)
            rule = f"p_{prefix}_{place}"
            self.lines.append(f"{rule}: {quoted(f'<parameter={name}>' + chr(10))} {body}")
            parts.append(rule if name in found.required else f"{rule}?")
        if found.others is not None:
            body = self._written(f"{prefix}_0", found.others, found.others_are_raw, found)
            self.lines.append(
                f"p_{prefix}_0: {quoted('<parameter=')} OTHER_NAME {quoted('>' + chr(10))} {body}"
            )
            parts.append(f"p_{prefix}_0*")
        return " ".join(parts)

    def _written(self, place: str, schema: object, is_raw: bool, found: Parameters) -> str:
        """Return the expression for a parameter's value and closing tag."""
        if is_raw:
            assert isinstance(schema, dict)
            self.lines.append(f"V_{place}: ({_text(schema, found.definitions)}) & {_NOT_ENDED}")
            self.lines.append(f"v_{place}[lazy]: V_{place} {quoted(VALUE_END)}")
            return f"v_{place} {quoted(chr(10))}"
        body = schema if isinstance(schema, dict) else {}
        whole = {"x-guidance": found.options, **body}
        if found.definitions:
            whole["$defs"] = found.definitions
        return f"{self.value(json.dumps(whole, ensure_ascii=False))} {quoted(VALUE_END + chr(10))}"


def _text(schema: Json, definitions: Json) -> str:
    """Return the terminal for a string schema."""
    if "$ref" in schema:
        return _text(definitions[schema["$ref"].removeprefix("#/$defs/")], definitions)
    if "anyOf" in schema:
        return " | ".join(f"({_text(each, definitions)})" for each in schema["anyOf"])
    if "enum" in schema:
        return " | ".join(quoted(each) for each in schema["enum"])
    parts = []
    if "pattern" in schema:
        regex = schema["pattern"].removeprefix("^").removesuffix("$")
        parts.append("/" + _REGEX_PIECE.sub(_escaped_slash, regex) + "/")
    low, high = schema.get("minLength", 0), schema.get("maxLength", "")
    if low or high != "":
        parts.append(f"/(?s:.{{{low},{high}}})/")
    return " & ".join(parts) or "TEXT"


def _escaped_slash(found: re.Match[str]) -> str:
    return found[0] if found[0] != "/" else "\\/"
