"""The Jinja environment that chat templates expect: transformers' settings, filters and functions."""

import json
from datetime import datetime
from typing import Any

import jinja2
import jinja2.ext

from mmengine.processing.chat.bounded_calls import MAX_SEPARATOR_CHARS
from mmengine.processing.chat.bounded_environment import BoundedEnvironment
from mmengine.processing.chat.template_work import check_size, refuse


def chat_environment() -> BoundedEnvironment:
    """Return a sandboxed environment with the settings, filters and functions that transformers provides to
    templates.
    """
    environment = BoundedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols]
    )
    environment.add_filter("tojson", _tojson)
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


class _Generation(jinja2.ext.Extension):
    """The tag {% generation %}, which marks training targets. Here, the tag only renders its body."""

    tags = {"generation"}

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Serialise to JSON. Jinja's own filter escapes characters for HTML, which would be wrong in prompts."""
    if indent is None:
        return json.dumps(value, ensure_ascii=ensure_ascii, separators=separators, sort_keys=sort_keys)
    encoder = json.JSONEncoder(
        ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )
    parts, size = [], 0
    for part in encoder.iterencode(value):  # Stops early if a long indentation makes the text too large.
        parts.append(part)
        check_size(size := size + len(part))
    return "".join(parts)


def _strftime_now(form: str) -> str:
    if len(form) > MAX_SEPARATOR_CHARS:
        refuse()
    return datetime.now().strftime(form)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)
