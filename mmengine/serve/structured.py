"""Forms of answers as callers give them: types beside schemas, and answers as values."""

from collections.abc import Mapping
from typing import Any, NamedTuple

from mmengine.errors import InvalidRequest, RequestFailed, shown
from mmengine.serve.answers import Completion
from mmengine.structured_output.spec import grammar_of, reasoning_of
from mmengine.structured_output.types import decode, schema_of


class ResponseFormat(NamedTuple):
    """Of an answer, as Options has it."""

    grammar: str | None
    reasoning: bool | None


NO_RESPONSE_FORMAT = ResponseFormat(None, None)


def response_format_of(response_format: Any, grammar: Mapping[str, Any] | None) -> ResponseFormat:
    """What a caller asks for: by `grammar_of` and `reasoning_of`, but that `response_format` may be a type in
    place of a schema. Raises InvalidRequest."""
    if response_format is not None and not isinstance(response_format, (Mapping, str)):
        response_format = _asked(response_format)
    return ResponseFormat(grammar_of(response_format, grammar), reasoning_of(response_format, grammar))


def json_format(
    schema: Any, options: Mapping[str, Any], reasoning: bool | None, on_truncation: str
) -> dict[str, Any]:
    """The response_format for a schema or a type. Raises InvalidRequest for options that ask for another
    form, or for several answers."""
    for name in ("response_format", "grammar"):
        if options.get(name) is not None:
            raise InvalidRequest(f"generate_json takes a schema, not {name} beside it")
    sampling = options.get("sampling")
    if (sampling.n if sampling is not None else options.get("n", 1)) != 1:
        raise InvalidRequest("generate_json gives one value; for n answers use generate with response_format")
    return {**_asked(schema), "reasoning": reasoning, "on_truncation": on_truncation}


def _asked(schema: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"schema": schema_of(schema)}}


def decoded(completion: Completion, schema: Any) -> Any:
    """The value of an answer. Raises RequestFailed for one that was cut, with what there is of it."""
    content = completion.choices[0].content
    if completion.finish_reason == "length":
        what = "the reasoning did not end" if content is None else "the JSON is incomplete"
        raise RequestFailed(
            f"{what} after {len(completion.token_ids)} tokens; raise max_tokens. It begins "
            f"{shown(completion.text if content is None else content)}"
        )
    return decode(content, schema)
