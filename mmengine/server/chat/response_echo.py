"""The parameters of a call that a response object of the Responses API repeats."""

import msgspec

NOTHING = msgspec.Raw(b"[]")
ANY_TOOL = msgspec.Raw(b'"auto"')
PLAIN_TEXT = msgspec.Raw(b'{"format":{"type":"text"},"verbosity":"medium"}')
NO_REASONING = msgspec.Raw(b'{"effort":null,"summary":null}')


def echo_json(value: object, default: msgspec.Raw) -> msgspec.Raw:
    """Return `value` as JSON. If this JSON equals `default`, return `default` itself, because msgspec omits
    only fields with the identical default object.
    """
    data = msgspec.Raw(msgspec.json.encode(value))
    return default if data == default else data


class ResponseEcho(msgspec.Struct, frozen=True, omit_defaults=True):
    """The call parameters that a response object repeats. Raw fields contain JSON.

    `store`: whether the server stores the response. `input`: for a stored response, the call's input items as
    a JSON list, with sha256:DIGEST instead of media data.
    """

    instructions: str | None = None
    tools: msgspec.Raw = NOTHING
    tool_choice: msgspec.Raw = ANY_TOOL
    parallel_tool_calls: bool = True
    text: msgspec.Raw = PLAIN_TEXT
    reasoning: msgspec.Raw = NO_REASONING
    temperature: float = 1.0
    top_p: float = 1.0
    max_output_tokens: int | None = None
    max_tool_calls: int | None = None
    top_logprobs: int = 0
    previous_response_id: str | None = None
    metadata: dict[str, str] = {}
    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    background: bool = False
    store: bool = True
    input: msgspec.Raw = NOTHING
    # In a log, True means that the input was too large for the log. Only the store contains the input.
    is_begun: bool = False
