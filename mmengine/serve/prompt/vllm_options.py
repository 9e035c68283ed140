"""Translates vLLM's options for structured output, such as `structured_outputs` and `guided_json`.

Each option becomes a response_format or a grammar. An option without a translation raises InvalidRequest.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import asdict, is_dataclass
from typing import Any

from mmengine.errors import FIELD, FieldPath, InvalidRequest, shown
from mmengine.structured_output.json_schema.reading.loading import MAX_BYTES
from mmengine.structured_output.request.fields import check_mapping

KINDS = ("json", "regex", "choice", "grammar", "json_object", "structural_tag")
_GUIDED = {
    **{f"guided_{kind}": kind for kind in KINDS if kind != "structural_tag"},
    "structural_tag": "structural_tag",
    "guided_decoding_backend": "backend",
    "guided_whitespace_pattern": "whitespace_pattern",
}
VLLM_NAMES = frozenset({"structured_outputs", *_GUIDED})
_SPACE = 'white space is bounded with "bounds": {"whitespace": n} in response_format'
_REFUSED = {
    "backend": "the setting grammar_backend selects the backend for all requests",
    "whitespace_pattern": _SPACE,
    "disable_any_whitespace": _SPACE,
    "disable_additional_properties": "write additionalProperties: false into the schema",
}
_IDLE = {
    "backend": ("auto",),
    "disable_fallback": (True, False),
}  # accepted without effect: "auto" selects no backend, and mmengine never falls back to another backend
_EBNF = re.compile(r"^\s*[\w-]+\s*::=", re.MULTILINE)


def as_form(options: Mapping[str, object]) -> tuple[Any, Any]:
    """Return the pair (response_format, grammar) that `options` request. At most one is not None.

    Raises InvalidRequest if two formats are requested, and for options without a translation.
    """
    requested: dict[str, dict[str, Any]] = {}
    for name in ("response_format", "grammar"):
        if options.get(name) is not None:
            requested[name] = {name: options[name]}
    for name in sorted(VLLM_NAMES & options.keys()):
        if options[name] is not None:
            form = (
                _structured(options[name])
                if name == "structured_outputs"
                else _form(FieldPath(name), options[name])
            )
            if form:
                requested[name] = form
    if len(requested) > 1:
        raise InvalidRequest(
            f"{' and '.join(requested)} each request an answer format: give only one of them"
        )
    form = next(iter(requested.values()), {})
    return form.get("response_format"), form.get("grammar")


def _structured(value: object) -> dict[str, object]:
    fields = asdict(value) if is_dataclass(value) and not isinstance(value, type) else value
    given = {
        FieldPath("structured_outputs", name): each
        for name, each in check_mapping(FieldPath("structured_outputs"), fields).items()
        if each is not None and not name.startswith("_")
    }
    forms = [form for name, each in given.items() if (form := _form(name, each))]
    if len(forms) != 1:
        raise InvalidRequest(
            f"{FIELD} must contain exactly one of {', '.join(KINDS)}", path=FieldPath("structured_outputs")
        )
    return forms[0]


def _form(where: FieldPath, value: object) -> dict[str, object]:
    """Return a dict with the key response_format or grammar, or {} if the field requests no format."""
    name = str(where[-1])
    kind = _GUIDED.get(name, name)
    if kind in _REFUSED or kind in _IDLE:
        if value is False or value in _IDLE.get(kind, ()):
            return {}
        raise InvalidRequest(
            f"{FIELD} is not supported: {_REFUSED.get(kind, 'there is no fallback')}", path=where
        )
    if kind not in KINDS:
        names = dict.fromkeys((*KINDS, *_REFUSED, *_IDLE))
        raise InvalidRequest(f"{FIELD} is unknown; known are {', '.join(names)}", path=where)
    if kind == "json":
        return {"response_format": {"type": "json_schema", "json_schema": {"schema": _parsed(where, value)}}}
    if kind == "json_object":
        if not isinstance(value, bool):
            raise InvalidRequest(f"{FIELD} must be true or false, not {shown(value)}", path=where)
        return {"response_format": {"type": "json_object"}} if value else {}
    if kind == "structural_tag":
        return {"response_format": {"type": "structural_tag", **check_mapping(where, _parsed(where, value))}}
    if kind == "grammar":
        if isinstance(value, str):
            value = value.removeprefix("\ufeff")
        is_ebnf = isinstance(value, str) and _EBNF.search(value)
        return {"grammar": {"gbnf" if is_ebnf else "lark": value}}
    return {"grammar": {kind: value}}


def _parsed(where: FieldPath, value: object) -> object:
    """Decode JSON text. A value that is not text is returned unchanged."""
    if not isinstance(value, str):
        return value
    if len(value) > MAX_BYTES:
        raise InvalidRequest(f"{FIELD} has more than {MAX_BYTES:,} characters", path=where)
    try:
        return json.loads(value.removeprefix("\ufeff"))
    except (ValueError, RecursionError) as error:
        raise InvalidRequest(f"{FIELD} is not JSON: {str(error)[:200]}", path=where) from None
