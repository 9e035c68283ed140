"""What a response says of the call that it answers."""

import msgspec

NOTHING = msgspec.Raw(b"[]")
ANY_TOOL = msgspec.Raw(b'"auto"')
PLAIN_TEXT = msgspec.Raw(b'{"format":{"type":"text"},"verbosity":"medium"}')
NO_REASONING = msgspec.Raw(b'{"effort":null,"summary":null}')


def echo_json(value: object, default: msgspec.Raw) -> msgspec.Raw:
    """As JSON. The default itself where it says the same: msgspec leaves out no other that is equal to it."""
    data = msgspec.Raw(msgspec.json.encode(value))
    return default if data == default else data


class ResponseEcho(msgspec.Struct, frozen=True, omit_defaults=True):
    """All that a response object repeats of its call, beside what the envelope has. JSON stands as it goes
    out. `store`: where the server keeps it. `input`: of one that is stored, the items of this call
    alone, as a JSON list; an image or video that came as data stands there as sha256: and the hex of what its
    bytes hash to."""

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
    is_begun: bool = False  # the input is too large for the log, and stands in the store
