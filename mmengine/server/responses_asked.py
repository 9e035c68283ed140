"""What a response says of the call that it answers."""

import msgspec


class ResponsesAsked(msgspec.Struct, frozen=True, omit_defaults=True):
    """All that a response object repeats of its call, beside what the envelope has. JSON stands as it goes
    out. `store`: where the server keeps it. `input`: of one that is stored, the items of this call
    alone, as a JSON list; an image or video that came as data stands there as sha256: and the hex of what its
    bytes hash to."""

    instructions: str | None = None
    tools: msgspec.Raw = msgspec.Raw(b"[]")
    tool_choice: msgspec.Raw = msgspec.Raw(b'"auto"')
    parallel_tool_calls: bool = True
    text: msgspec.Raw = msgspec.Raw(b'{"format":{"type":"text"},"verbosity":"medium"}')
    reasoning: msgspec.Raw = msgspec.Raw(b'{"effort":null,"summary":null}')
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
    input: msgspec.Raw = msgspec.Raw(b"[]")
    is_begun: bool = False  # the input is too large for the log, and stands in the store
