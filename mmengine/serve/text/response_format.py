"""Parses response formats, which may contain a Python type or a schema, and decodes JSON answers."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple

from mmengine.errors import FIELD, FieldPath, InvalidRequest, RequestFailed, shown
from mmengine.request import GrammarRequest, SamplingParams
from mmengine.serve.prompt.options import FORM, GenerateOptions, Options
from mmengine.serve.prompt.tools import call_grammar, notes_on
from mmengine.serve.prompt.vllm_options import as_form
from mmengine.serve.text.request_output import CUT, CUT_AT_STOP, REPEATED, Completion
from mmengine.structured_output.field_confidence.fields import FieldConfidence
from mmengine.structured_output.json_schema.vocabulary.notes import Note
from mmengine.structured_output.request.fields import Truncation, truncation_of
from mmengine.structured_output.request.spec import grammar_of, notes_of, reasoning_of
from mmengine.structured_output.types.types import decode, schema_of


class ResponseFormat(NamedTuple):
    """An answer's format, as fields for Options."""

    grammar: GrammarRequest | None
    reasoning: bool | None
    notes: tuple[Note, ...] = ()

    @classmethod
    def of(cls, form: Mapping[str, object] | None, grammar: Mapping[str, object] | None) -> "ResponseFormat":
        """Return the format that a response_format or a grammar describes. Raises InvalidRequest."""
        return cls(grammar_of(form, grammar), reasoning_of(form, grammar), notes_of(form))

    def added_to(self, options: Options) -> Options:
        return replace(options, grammar=self.grammar, reasoning=self.reasoning, notes=self.notes)


def response_format_of(options: Mapping[str, Any]) -> ResponseFormat:
    """Return the format that `options` request with `response_format`, `grammar` or vLLM's option names.

    A response_format, or the schema in a response_format, may be a Python type. If `options` has `calls`, the
    format also allows tool calls. Raises InvalidRequest.
    """
    form, grammar = as_form(options)
    form = _described(_schema_format(form) if _is_type(form) else form)
    calls = options.get("calls")
    truncation: Truncation = "length"
    if calls is not None and isinstance(form, Mapping):
        form, truncation = truncation_of(FieldPath("response_format"), form)
    elif calls is not None and grammar is not None:
        grammar, truncation = truncation_of(FieldPath("grammar"), grammar)
    found = ResponseFormat.of(form, grammar)
    if calls is None:
        return found
    if found.grammar is not None and found.grammar.field_confidence:
        raise InvalidRequest(
            f"{FIELD} cannot go with tools, whose calls have no fields of the format; leave out one of them",
            path=FieldPath("response_format", "field_confidence"),
        )
    made = call_grammar(calls, found.grammar, truncation)
    return found._replace(grammar=made, notes=found.notes + notes_on(made))


def _is_type(form: object) -> bool:
    return form is not None and not isinstance(form, (Mapping, str))


def _described(form: Any) -> Any:
    """Return a response_format after replacing a Python type by the type's schema."""
    held = form.get("json_schema") if isinstance(form, Mapping) else None
    if not isinstance(held, Mapping):
        return form
    schema = held.get("schema")
    if schema is None or isinstance(schema, dict | bool | str | bytes | int | float | list):
        return form
    return {**form, "json_schema": {**held, "schema": schema_of(schema)}}


def json_format(
    schema: object,
    sampling: SamplingParams | None,
    options: GenerateOptions,
    reasoning: bool | None,
    on_truncation: str,
    confidence: bool,
) -> dict[str, Any]:
    """Return the response_format for a JSON schema or a Python type.

    Raises InvalidRequest for options that request another format or several answers.
    """
    for name in sorted(FORM):
        if options.get(name) is not None:
            raise InvalidRequest(f"generate_json takes a schema; leave out {name}")
    if (sampling.n if sampling is not None else options.get("n", 1)) != 1:
        raise InvalidRequest("generate_json gives one value; for n answers use generate with response_format")
    form = {**_schema_format(schema), "reasoning": reasoning, "on_truncation": on_truncation}
    return {**form, "field_confidence": True} if confidence else form


def _schema_format(schema: object) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"schema": schema}}


# `Choice.detail` of an incomplete answer -> advice for the error message.
_HOW = {
    CUT: "raise max_tokens",
    CUT_AT_STOP: "a stop string cut the answer; leave the stop string out",
    REPEATED: "the answer repeated itself; set on_truncation to close, or leave out repetition_detection",
}


class ConfidentValue(NamedTuple):
    """An answer's value. `confidence`: the fields' confidences by JSON pointer, or None before the answer's
    end.
    """

    value: object
    confidence: dict[str, FieldConfidence] | None


def decode_answer(completion: Completion, schema: object, confidence: bool = False) -> object:
    """Decode a JSON answer and return its value or, with `confidence`, a ConfidentValue.

    Raises RequestFailed if the answer was cut; the message has the answer's beginning.
    """
    content = completion.choices[0].content
    detail = completion.choices[0].detail
    if detail in _HOW or content is None:
        what = "the reasoning did not end" if content is None else "the JSON is incomplete"
        how = _HOW.get(detail, "raise max_tokens")
        raise RequestFailed(
            f"{what} after {len(completion.token_ids)} tokens; {how}. The answer begins "
            f"{shown(completion.text if content is None else content)}"
        )
    value = decode(content, schema)
    return ConfidentValue(value, completion.choices[0].field_confidence) if confidence else value
